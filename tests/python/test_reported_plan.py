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
    assert {call["where"] for call in plan["calls"]} >= {"worker", "trainer"}
    assert len(plan["calls"]) == len(loader.plan.moved) + len(loader.plan.kept)
    assert "calls run in the workers" in plan["verdict"]
    assert _pool.pool_plan(pool.endpoint, None, 12345, 5.0) == ""
