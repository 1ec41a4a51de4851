# SPDX-License-Identifier: Apache-2.0
"""A trainer's plan, as its controller was told it (`graph/plan_told.py`), for a page that draws it.
Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.graph.call_groups import CallGroup, group_calls, shared_places, title_of
from penstock.graph.plan_record import PlannedCall, PlannedEdge, PlanRecord
from penstock.graph.plan_table import NumberedReasons

_TITLE_MAX = 30  # characters
_MEMBERS_MAX = 24  # calls of a group that are named
_REASONS_MAX = 6


def shown_plan_graph(told: str) -> dict[str, Any] | None:
    """Calls in their order, and edges by the places of calls in that list: None as ``source`` is
    the batch, None as ``target`` is the program. Several calls of a large plan are one, the same as
    in `Plan.to_svg()`. None for a trainer that has no plan. Raises ValueError for what is no plan:
    trainers say what they like."""
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
    groups, links = group_calls(_record(plan))
    with_calls = [number for number, group in enumerate(groups) if group.calls]
    place_of = {number: place for place, number in enumerate(with_calls)}
    return {
        "verdict": plan["verdict"],
        "facts": list(_facts(plan)),
        "calls": [_shown(groups[number]) for number in with_calls],
        "edges": [
            {
                "source": place_of.get(link.source),
                "target": place_of.get(link.target),
                "bytes": link.tensor_bytes,
                "leaves": list(groups[link.source].leaves),
            }
            for link in links
        ],
        "calls_left_out": plan["calls_left_out"],
    }


def _record(plan: dict[str, Any]) -> PlanRecord:
    """The calls and the edges that were told, as the façade has them."""
    calls = [
        PlannedCall(
            call["index"],
            call["operator"],
            call["place"],
            plan["reasons"][call["reason"]],
            call["seconds"],
            call["seconds"],
            call["bytes"],
        )
        for call in plan["calls"]
    ]
    known = {call.index for call in calls} | {None}
    edges = [
        PlannedEdge(edge["source"], edge["target"], edge["bytes"], edge["leaf"])
        for edge in plan["edges"]
        if edge["source"] in known and edge["target"] in known
    ]
    return PlanRecord(
        moved=tuple(call for call in calls if call.place == "worker"),
        kept=tuple(call for call in calls if call.place != "worker"),
        edges=tuple(edge for edge in edges if (edge.source is None) == (edge.leaf is not None)),
    )


def _shown(group: CallGroup) -> dict[str, Any]:
    first, *more = group.calls
    name = first.operator
    if more:
        name = " at ".join(filter(None, (title_of(group, _TITLE_MAX), shared_places(group.calls))))
    reasons = NumberedReasons(group.calls).spoken()
    members = [call.operator for call in group.calls]
    return {
        "name": name,
        "where": first.place,
        "reason": "; ".join(_begun(reasons, _REASONS_MAX, "reasons")),
        "seconds": sum(call.worker_s for call in group.calls),
        "bytes": sum(call.made_bytes for call in group.calls),
        "count": len(group.calls),
        "members": _begun(members, _MEMBERS_MAX, "calls") if more else [],
    }


def _begun(texts: Sequence[str], count_max: int, name: str) -> list[str]:
    left_out = len(texts) - count_max
    return [*texts[:count_max], *([f"and {left_out} more {name}"] if left_out > 0 else [])]


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
