# SPDX-License-Identifier: Apache-2.0
"""Made-up pools for tests of what shows them, in the form in which a controller reports them."""

from __future__ import annotations

from typing import Any

import test_pool_status
from test_pool_status import CONTROLLER, ENGINE, worker

from penstock.live.pool_view import PoolView, pool_view
from penstock.live.step_parts import STEP_PARTS

FIRST, SECOND = "11a1000000000001", "11a2000000000001"
GROUP = "99a0000000000001"


PLAN = {
    "verdict": "3 of 5 calls run in the workers, which saves 4.1 ms of each step",
    "calls": [
        {
            "name": name,
            "where": where,
            "reason": reason,
            "seconds": seconds,
            "inputs": inputs,
            "bytes": size,
        }
        for name, where, reason, seconds, inputs, size in (
            ("to(float32)", "worker", "it depends on the batch alone", 1.1e-3, [], 602_112),
            ("div(255)", "worker", "it depends on the batch alone", 0.9e-3, [0], 602_112),
            ("normalize", "worker", "it depends on the batch alone", 2.1e-3, [1], 602_112),
            ("conv1", "trainer", "it takes a parameter that is trained", 9e-3, [2], 3_211_264),
            ("relu", "trainer", "it comes after a call that stays", 0.4e-3, [3, 2], 3_211_264),
        )
    ],
}


def trainer(number: int, **others: Any) -> dict[str, Any]:
    made = test_pool_status.trainer(number, **others)
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
    """With so many seconds in each part that is named."""
    parts = {f"{part.name}_s": 0.0 for part in STEP_PARTS}
    return {"steps": steps, **parts, **{f"{name}_s": value for name, value in seconds.items()}}


def busy_status(**others: Any) -> dict[str, Any]:
    """Two jobs of which one has two ranks, four workers of which one drains, and an engine."""
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
                plan=PLAN,
            ),
            trainer(2, rank=0, limited_by="workers", waited_share=0.5, **rank),
            trainer(3, rank=1, limited_by="trainer", waited_share=0.02, workers=1, **rank),
        ],
        engine=ENGINE,
        **others,
    )


def busy_pool(**others: Any) -> PoolView:
    return pool_view(busy_status(**others), 1_800_000_000.0)
