# SPDX-License-Identifier: Apache-2.0
"""A pool's controller knows the plans of its trainers, for people who watch the pool."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from torch.utils.data import TensorDataset

import penstock
from penstock import DataLoader, _pool
from penstock.graph.plan import Plan, PlannedCall, PlannedEdge, plan_for_dashboard


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sin(values.float() / 255).sqrt().nan_to_num())


@pytest.mark.slow
def test_controller_has_the_plan_of_a_trainer(
    pool: PoolProcesses,
) -> None:
    pool.start_worker()
    data = TensorDataset(torch.randint(0, 255, (4096, 64), dtype=torch.uint8))
    loader = DataLoader(data, batch_size=8, pool=pool.endpoint)
    model = penstock.offload(Scaled(), loader, cut="maximal")
    batches = iter(loader)

    def told() -> str:
        trainers = pool.status()["trainers"]
        if not trainers:
            return ""
        return _pool.pool_plan(pool.endpoint, None, int(trainers[0]["id"], 16), 5.0)

    deadline = time.monotonic() + SECONDS_MAX
    while not (text := told()):
        model(next(batches)[0])
        assert time.monotonic() < deadline
        time.sleep(0.05)
    plan = json.loads(text)
    assert loader.plan is not None
    assert {call["place"] for call in plan["calls"]} >= {"worker", "trainer"}
    assert len(plan["calls"]) == len(loader.plan.moved) + len(loader.plan.kept)
    assert "calls run in the workers" in plan["verdict"]
    assert _pool.pool_plan(pool.endpoint, None, 12345, 5.0) == ""


def plan_of(count: int) -> Plan:
    calls = tuple(
        PlannedCall(
            number, f"sin at model.py:{number}", "worker", f"reason {number}", 1e-3, 2e-3, 8
        )
        for number in range(count)
    )
    edges = tuple(
        PlannedEdge(number - 1 if number else None, number, 8, None if number else 0)
        for number in range(count)
    )
    return Plan(moved=calls, edges=edges)


def test_too_long_plan_is_truncated_with_a_count() -> None:
    whole = json.loads(plan_for_dashboard(plan_of(5), 1 << 16))
    assert whole["calls_left_out"] == 0
    assert [call["index"] for call in whole["calls"]] == [0, 1, 2, 3, 4]
    assert whole["reasons"][whole["calls"][3]["reason"]] == "reason 3"
    assert whole["edges"][0] == {"source": None, "target": 0, "bytes": 8, "leaf": 0}
    for bytes_max in (4096, 1 << 16):
        text = plan_for_dashboard(plan_of(2000), bytes_max)
        part = json.loads(text)
        assert bytes_max // 4 < len(text.encode()) <= bytes_max
        assert len(part["calls"]) + part["calls_left_out"] == 2000
        known = {call["index"] for call in part["calls"]} | {None}
        assert all(edge["source"] in known and edge["target"] in known for edge in part["edges"])


def test_refused_plan_is_sent_as_its_reason() -> None:
    told = json.loads(plan_for_dashboard(Plan(refused="it has no graph"), 4096))
    assert told["verdict"] == "no call moves: it has no graph"
    assert told["calls"] == []
