# SPDX-License-Identifier: Apache-2.0
"""A trainer's plan, as its controller was told it (`graph/plan_told.py`), for a page that draws it.
Pure."""

from __future__ import annotations

import json
from typing import Any


def shown_plan_graph(told: str) -> dict[str, Any] | None:
    """Calls in their order, and edges by the places of calls in that list: None as ``source`` is
    the batch, None as ``target`` is the program. None for a trainer that has no plan. Raises
    ValueError for what is no plan: trainers say what they like."""
    if not told:
        return None
    try:
        return _graph(json.loads(told))
    except Exception as error:
        raise ValueError(
            f"the trainer has reported something that is no plan "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _graph(plan: dict[str, Any]) -> dict[str, Any]:
    place_of = {call["index"]: place for place, call in enumerate(plan["calls"])}
    return {
        "verdict": plan["verdict"],
        "facts": list(_facts(plan)),
        "calls": [
            {
                "name": call["operator"],
                "where": call["place"],
                "reason": plan["reasons"][call["reason"]],
                "seconds": call["seconds"],
                "bytes": call["bytes"],
            }
            for call in plan["calls"]
        ],
        "edges": [
            {
                "source": place_of.get(edge["source"]),
                "target": place_of.get(edge["target"]),
                "bytes": edge["bytes"],
                "leaf": edge["leaf"],
            }
            for edge in plan["edges"]
        ],
        "calls_left_out": plan["calls_left_out"],
    }


def _facts(plan: dict[str, Any]) -> list[str]:
    """Sentences on the prices of the plan."""
    facts = []
    cuts = {
        "none": "nothing moved",
        "maximal": "all moved that can",
        "chosen": "this plan",
        "exact": "without cut_tolerance",
    }
    for total in plan["totals"]:
        facts.append(
            f"{cuts.get(total['cut'], total['cut'])}: {1e3 * total['worker_s']:.3g} ms of a worker "
            f"and {1e3 * total['trainer_s']:.3g} ms of the trainer a batch, "
            f"{total['boundary_bytes'] / 1e6:.3g} MB for the trainer to read"
        )
    if (priced := plan["priced"]) is not None:
        facts.append(
            f"measured in the running loader {priced['times']} times, and changed for it "
            f"{priced['changes']} times: {1e3 * priced['step_s']:.3g} ms a step"
        )
    return facts
