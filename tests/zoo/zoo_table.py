# SPDX-License-Identifier: Apache-2.0
"""Prints the zoo as a Markdown table: the operations that a cut of each model moves, the tensors
that cross, and whether its training is bit-for-bit identical.

usage: PYTHONPATH=tests/python python tests/zoo/zoo_table.py [NAME...]
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence

import torch
from cut_models import Case
from torch._dynamo.utils import counters
from zoo_models import ZOO
from zoo_runs import differences, with_cut, without_cut

from penstock.graph.plan import Plan

HEADER = (
    "model",
    "style",
    "capture route",
    "maximal: calls moved / kept",
    "auto: calls moved / kept",
    "raw bytes",
    "maximal bytes",
    "chosen bytes",
    "identical",
)
REASON_LENGTH_MAX = 110


def main(names: Sequence[str]) -> None:
    logging.getLogger("penstock").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| " + " | ".join(HEADER) + " |")
    print("|" + " --- |" * len(HEADER))
    for case in ZOO:
        if not names or case.name in names:
            print("| " + " | ".join(row(case)) + " |", flush=True)


def row(case: Case) -> list[str]:
    if case.package and importlib.util.find_spec(case.package) is None:
        return [case.name, case.style, f"not run: {case.package} is missing", *[""] * 6]
    expected = without_cut(case)
    counters.clear()
    life, maximal, _ = with_cut(case, "maximal", is_whole=False)
    where = route(maximal)
    life_by_price, chosen, _ = with_cut(case, "auto", is_whole=False)
    whole_life, _, _ = with_cut(case, "maximal")
    wrong = differences(whole_life, expected)
    if not life.trained == life_by_price.trained == expected.trained:
        wrong.append("another training")
    return [
        case.name,
        case.style,
        where,
        calls(maximal),
        calls(chosen),
        f"{maximal.raw_bytes:,}" if has_prices(maximal) else "",
        f"{maximal.maximal_bytes:,}" if has_prices(maximal) else "",
        f"{chosen.boundary_bytes:,}" if has_prices(chosen) else "",
        "yes" if not wrong else "no: " + "; ".join(wrong),
    ]


def route(plan: Plan | None) -> str:
    """How Dynamo took the model, by Dynamo's counters, or why a cut is impossible."""
    if plan is None:
        return "no plan: no frame with the loader's tensors was captured"
    if plan.refused is not None:
        reason = plan.refused.replace("|", "/")
        if len(reason) > REASON_LENGTH_MAX:
            reason = reason[: REASON_LENGTH_MAX - 1] + "…"
        return f"refused: {reason}"
    graph_count = counters["stats"]["unique_graphs"]
    if not graph_count:
        return "read from TorchScript"
    if counters["graph_break"]:
        return f"several graphs ({graph_count})"
    return "whole graph" if graph_count == 1 else f"whole graph, captured {graph_count} times"


def calls(plan: Plan | None) -> str:
    return f"{len(plan.moved)} / {len(plan.kept)}" if has_prices(plan) else ""


def has_prices(plan: Plan | None) -> bool:
    return plan is not None and plan.refused is None


if __name__ == "__main__":
    main(sys.argv[1:])
