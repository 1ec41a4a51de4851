# SPDX-License-Identifier: Apache-2.0
"""A plan that was reported to a controller becomes calls and edges for a drawing."""

from __future__ import annotations

import json

from shown_pools import PLAN, large_plan

from penstock.graph.call_groups import group_calls
from penstock.graph.plan import Plan, PlannedCall, PlannedEdge, plan_for_dashboard
from penstock.live.pool_watch import shown_plan_graph


def test_edges_refer_to_calls_by_position() -> None:
    plan = shown_plan_graph(json.dumps(PLAN))
    assert plan is not None
    names = [call["name"] for call in plan["calls"]]
    assert names[2] == "normalize at model.py:13"
    pairs = {(edge["source"], edge["target"]) for edge in plan["edges"]}
    assert pairs == {(None, 0), (0, 1), (1, 2), (0, 2), (2, 4), (None, 4), (4, None)}
    assert plan["calls"][4]["reason"] == "it takes a parameter that is trained"
    assert plan["calls"][3]["where"] == "both" and plan["calls_left_out"] == 2
    assert plan["facts"][1].startswith("this plan: 4.1 ms of worker time and 4 ms of trainer time")


def test_large_plan_is_grouped_like_its_svg() -> None:
    """Each of its calls had a box, and the page was ten thousand pixels high."""
    whole = large_plan()
    plan = shown_plan_graph(plan_for_dashboard(whole, 1 << 20))
    assert plan is not None and plan["calls_left_out"] == 0
    groups = [group for group in group_calls(whole)[0] if group.calls]
    assert [call["count"] for call in plan["calls"]] == [len(group.calls) for group in groups]
    assert [call["where"] for call in plan["calls"]] == ["worker"] * 12 + ["trainer"]
    assert plan["calls"][1]["name"] == "batch_norm at model.py:1"
    folded = plan["calls"][-1]
    assert folded["name"] == "conv2d … add (184) at model.py:12-195"
    assert folded["members"][0] == "conv2d at model.py:12"
    assert folded["members"][-1] == "and 160 more calls"
    assert "which training changes" in folded["reason"] and folded["bytes"] == 184 * 64
    edges = [(edge["source"], edge["target"]) for edge in plan["edges"]]
    assert edges == [(None, 0), *((place - 1, place) for place in range(1, 13)), (12, None)]
    assert plan["edges"][0]["leaves"] == [0]


def test_edges_to_omitted_calls_are_dropped() -> None:
    edges = [
        *PLAN["edges"],
        {"source": 999, "target": 40, "bytes": 1, "leaf": None},
        {"source": None, "target": 40, "bytes": 1, "leaf": None},
    ]
    assert shown_plan_graph(json.dumps({**PLAN, "edges": edges})) == shown_plan_graph(
        json.dumps(PLAN)
    )


def test_measured_plan_lists_its_measurement() -> None:
    priced = {
        "times": 7, "changes": 1, "trainer_s": 0.02, "worker_s": 0.04, "worker_count": 2,
        "link_s": 0.0, "step_s": 0.021, "is_held": False,
    }  # fmt: skip
    plan = shown_plan_graph(json.dumps({**PLAN, "priced": priced, "totals": []}))
    assert plan is not None
    (fact,) = plan["facts"]
    assert fact == (
        "measured 7 times in the running loader, which changed the plan 1 times: 21 ms per step"
    )


def test_sample_plan_has_the_format_of_reported_plans() -> None:
    calls = (PlannedCall(3, "sin at model.py:1", "worker", "it can", 1e-3, 2e-3, 8),)
    told = json.loads(
        plan_for_dashboard(Plan(moved=calls, edges=(PlannedEdge(None, 3, 8, 0),)), 4096)
    )
    assert set(told) >= set(PLAN) and set(told["calls"][0]) == set(PLAN["calls"][0])
    assert set(told["edges"][0]) == set(PLAN["edges"][0])
    plan = shown_plan_graph(json.dumps(told))
    assert plan is not None and plan["edges"][0]["target"] == 0


def test_empty_plan_has_no_graph() -> None:
    assert shown_plan_graph("") is None
