# SPDX-License-Identifier: Apache-2.0
"""Made-up pools for display tests, in the form in which a controller reports them."""

from __future__ import annotations

import json
from typing import Any

import test_pool_status
from test_pool_status import CONTROLLER, ENGINE, worker

from penstock.graph.plan import CutTotals, Plan, PlannedCall, PlannedEdge
from penstock.live.pool_view import STEP_PARTS, PoolView, pool_view

FIRST, SECOND = "11a1000000000001", "11a2000000000001"
GROUP = "99a0000000000001"


def small_plan() -> Plan:
    """Return a plan of five calls: three in the workers, one on both sides, one in the trainer."""
    alone, reads = "it depends on the batch alone", "it takes a parameter that is trained"
    calls = tuple(
        PlannedCall(10 * place, operator, where, reason, seconds, seconds, size)
        for place, (operator, where, reason, seconds, size) in enumerate(
            (
                ("to at model.py:12", "worker", alone, 1.1e-3, 602_112),
                ("div at model.py:12", "worker", alone, 0.9e-3, 602_112),
                ("normalize at model.py:13", "worker", alone, 2.1e-3, 602_112),
                ("size at model.py:14", "both", alone, 1e-6, 0),
                ("conv2d at model.py:15", "trainer", reads, 9e-3, 3_211_264),
            )
        )
    )
    return Plan(
        moved=calls[:3],
        kept=calls[3:],
        edges=(
            PlannedEdge(None, 0, 150_528, 0),
            PlannedEdge(0, 10, 602_112, None),
            PlannedEdge(10, 20, 602_112, None),
            PlannedEdge(0, 20, 602_112, None),
            PlannedEdge(20, 40, 602_112, None),
            PlannedEdge(None, 40, 512, 1),
            PlannedEdge(40, None, 3_211_264, None),
        ),
        totals=(
            CutTotals("none", 0.0, 0.004, 602_112, 602_112),
            CutTotals("chosen", 0.0041, 0.004, 602_112, 602_112),
        ),
    )


def told_plan() -> str:
    """Return the small plan as a trainer reports it, as if two more calls had not fitted."""
    return json.dumps({**json.loads(small_plan().told(1 << 16)), "calls_left_out": 2})


def large_plan() -> Plan:
    """Return a plan of 196 calls in sequence: 12 in the workers, and layers in the trainer."""
    names = ("conv2d", "batch_norm", "relu", "add")

    def call(number: int) -> PlannedCall:
        operator = f"{names[number % 4]} at model.py:{number}"
        if number < 12:
            return PlannedCall(number, operator, "worker", "it can", 1e-3, 2e-3, 64)
        reason = f"it reads layer{number}.weight, which training changes"
        return PlannedCall(number, operator, "trainer", reason, 0.0, 0.0, 64)

    calls = [call(number) for number in range(196)]
    return Plan(
        moved=tuple(calls[:12]),
        kept=tuple(calls[12:]),
        edges=(
            PlannedEdge(None, 0, 64, 0),
            *(PlannedEdge(number - 1, number, 64, None) for number in range(1, 196)),
            PlannedEdge(195, None, 64, None),
        ),
    )


def trainer(number: int, **others: Any) -> dict[str, Any]:
    made = test_pool_status.trainer(number, **{"hedged_batches": 0, "plan_changes": 0, **others})
    made["queue"]["wanted_batches"] = 4
    return made


def status(
    workers: list[dict[str, Any]], trainers: list[dict[str, Any]], **others: Any
) -> dict[str, Any]:
    return {
        "controller": {**CONTROLLER, "fenced_incarnations": 0},
        "engine": None,
        "workers": workers,
        "trainers": trainers,
        "workers_left_out": 0,
        "trainers_left_out": 0,
        **others,
    }


def ledger(steps: int = 100, **seconds: float) -> dict[str, Any]:
    """Return a ledger with the given seconds by part."""
    parts = {f"{part.name}_s": 0.0 for part in STEP_PARTS}
    return {"steps": steps, **parts, **{f"{name}_s": value for name, value in seconds.items()}}


def busy_status(**others: Any) -> dict[str, Any]:
    """Return a status with two jobs, one of them with two ranks, four workers, one of them
    draining, and an engine."""
    rank = {"job": "pretrain.py: Tokens", "group": GROUP, "world_size": 2, "user": "ann"}
    return status(
        [
            worker(1, trainer=FIRST),
            worker(2, trainer=SECOND),
            worker(3, trainer=SECOND, is_draining=True),
            worker(4),
        ],
        [
            trainer(
                1,
                ledger=ledger(compute=3.0, dataset=0.5, wire=0.5),
                batch_bytes=1_000_000,
            ),
            trainer(2, rank=0, limited_by="workers", waited_share=0.5, **rank),
            trainer(3, rank=1, limited_by="trainer", waited_share=0.02, workers=1, **rank),
        ],
        engine=ENGINE,
        **others,
    )


def busy_pool(**others: Any) -> PoolView:
    return pool_view(busy_status(**others), 1_800_000_000.0)
