# SPDX-License-Identifier: Apache-2.0
"""The summary of a plan is short and leaves out no call; its table and sentences are complete."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest
import torch
from shown_pools import large_plan, small_plan
from torch import nn

from penstock.explanation.explanation import explain
from penstock.graph.plan import Plan, PlannedCall
from penstock.graph.plan_record import CutTotals, PlanRecord, RunningPrice
from penstock.graph.plan_text import COLUMNS, MOVED_MAX, format_price, format_table, verdict

PRICE = RunningPrice(
    times=7,
    changes=2,
    trainer_s=0.004,
    worker_s=0.006,
    worker_count=3,
    link_s=0.0,
    step_s=0.005,
    is_held=False,
)


def test_running_price_lists_times_per_stage() -> None:
    assert format_price(PRICE) == (
        "Priced 7 times from the running loader, changed 2 times: a step takes 5 ms, the "
        "trainer 4 ms, one of 3 workers 6 ms."
    )


def test_running_price_includes_link_time() -> None:
    text = format_price(dataclasses.replace(PRICE, link_s=0.0071))
    assert text.endswith("one of 3 workers 6 ms, the link 7.1 ms.")


def test_pool_plan_lists_bytes_sent() -> None:
    totals = (
        CutTotals("none", 0.0, 0.002, 3_000, 3_000),
        CutTotals("maximal", 0.001, 0.0, 12_000, 12_000),
        CutTotals("chosen", 0.0, 0.002, 3_000, 3_000),
    )
    text = format_table(PlanRecord(totals=totals, link_bytes_per_s=125e6))
    assert "bytes sent" in text
    assert "everything that can move      1.000       0.000      12,000      12,000" in text
    assert "at 125 MB/s when the plan was made" in " ".join(text.split())
    assert "bytes sent" not in format_table(PlanRecord(totals=totals))


def test_running_price_reports_reverted_change() -> None:
    held = dataclasses.replace(PRICE, changes=1, worker_count=1, is_held=True)
    text = format_price(held)
    assert "changed once: " in text
    assert ", one of 1 worker " in text
    assert text.endswith(" A change that made steps longer was reverted.")


def call_of(index: int, place: str, reason: str = "because") -> PlannedCall:
    return PlannedCall(index, f"mul at m.py:{index}", place, reason, 1e-3, 2e-3, 4096)


def test_summary_has_a_line_for_each_moved_call_and_one_for_those_that_stay() -> None:
    lines = str(small_plan()).splitlines()
    assert " ".join(lines[:2]) == verdict(small_plan())
    assert lines[2:] == [
        "",
        "moves                     worker ms  trainer ms    bytes",
        "to at model.py:12             1.100       1.100  602,112",
        "div at model.py:12            0.900       0.900  602,112",
        "normalize at model.py:13      2.100       2.100  602,112",
        "... 1 call stays, conv2d at model.py:15: it takes a parameter that is trained",
        "... 1 call runs on both sides, size at model.py:14",
        "",
        "per batch  worker ms  trainer ms  bytes read",
        "no cut         0.000       4.000     602,112",
        "this plan      4.100       4.000     602,112",
        "plan.table(), or penstock explain --verbose, lists every call.",
    ]


@pytest.mark.parametrize("moved_count", [0, 1, MOVED_MAX, MOVED_MAX + 1, 300])
@pytest.mark.parametrize("kept_count", [0, 1, 500])
def test_summary_counts_every_call_in_few_short_lines(moved_count: int, kept_count: int) -> None:
    reasons = (
        "it could move, at the same price; 8 bytes",
        *(f"{'why ' * 40}{i}" for i in range(9)),
    )
    kept = tuple(
        call_of(i, "trainer" if i % 7 else "both", reasons[i % 10])
        for i in range(moved_count, moved_count + kept_count)
    )
    plan = Plan(moved=tuple(call_of(i, "worker") for i in range(moved_count)), kept=kept)
    lines = str(plan).splitlines()
    assert len(lines) <= MOVED_MAX + 7 and all(len(line) <= COLUMNS for line in lines)
    listed = sum(line.startswith("mul at") for line in lines)
    folded = sum(int(match[1]) for line in lines if (match := re.match(r"\.\.\. (\d+) ", line)))
    assert (listed == moved_count) is (moved_count <= MOVED_MAX)
    assert listed + folded == moved_count + kept_count


def test_summary_counts_the_reasons_of_calls_that_stay() -> None:
    assert "... 184 calls stay, conv2d … add at model.py:12-195: need parameters" in str(
        large_plan()
    )
    reasons = [
        *("it reads a.weight, which training changes", "it reads b.weight, which training changes"),
        *("it depends on a value that stays: (relu) reads a", "it draws random numbers"),
        *("(add_) writes its operand in place", "(mul_) writes its operand in place"),
        "it could move, but is cheaper in the trainer: moving it would cost 1.2 ms more per batch",
    ]
    plan = Plan(kept=tuple(call_of(i, "trainer", reason) for i, reason in enumerate(reasons)))
    text = str(plan)
    assert "... 1 call could move but stays, mul at m.py:6: cheaper in the trainer\n" in text
    assert (
        "... 6 calls stay, mul … mul at m.py:0-5: 2 need parameters, 2 write in place, 1 needs "
    ) in text


def test_summary_of_a_real_model_folds_its_layers() -> None:
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.ReLU())]
    plan = explain(nn.Sequential(nn.Flatten(), *layers), torch.zeros(8, 8, 8), cut="maximal")
    lines = str(plan).splitlines()
    assert len(lines) <= 12 and lines[0] == verdict(plan)[: len(lines[0])]
    stay = next(line for line in lines if " calls stay, " in line)
    assert re.match(r"\.\.\. 40 calls stay, linear … relu(?: at \S+)?: 20 need ", stay), stay
    table = plan.table().splitlines()
    assert sum(line.startswith(("linear ", "relu ")) for line in table) == 40
    assert all(len(line) <= COLUMNS for line in table)


def test_workers_that_run_only_a_part_are_in_the_summary() -> None:
    plan = dataclasses.replace(small_plan(), workers_apart=("node1/17: exponentials differ",))
    assert "node1/17: exponentials differ" in str(plan)


ODD = "<script>alert('a')</script> & \"b\" at <m>.py:1"


def test_notebook_shows_summary_and_folded_table() -> None:
    """Its colours are those of the page, and program text is not parsed as markup."""
    odd = PlannedCall(0, ODD, "worker", f"because of {ODD}", 1e-3, 2e-3, 4096)
    for plan in (small_plan(), Plan(moved=(odd,)), Plan(refused=ODD)):
        tree = ElementTree.fromstring(plan._repr_html_())
        assert [element.tag for element in tree.iter()] == [
            "div",
            "pre",
            "details",
            "summary",
            "pre",
        ]
        shown, table = ("".join(element.itertext()) for element in tree.iter("pre"))
        assert (shown, table) == (str(plan), plan.table())
        styles = {element.get("style") for element in tree.iter("pre")}
        assert styles == {"background:none;color:inherit;overflow-x:auto"}
