# SPDX-License-Identifier: Apache-2.0
"""A pool gives each job as many workers as it can use, from its trainer's reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from torch.utils.data import Dataset

from penstock import DataLoader

pytestmark = pytest.mark.slow


class Slow(Dataset[torch.Tensor]):
    """A sample takes its worker this long, asleep, so that two cores can simulate many workers."""

    def __init__(self, seconds: float, count: int = 100_000) -> None:
        self.seconds = seconds
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), float(index))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Training:
    """Trains on a thread until it is stopped, and checks each batch."""

    def __init__(self, pool: PoolProcesses, batch_s: float, step_s: float) -> None:
        self._loader = DataLoader(Slow(batch_s), batch_size=None, pool=pool.endpoint)
        self._step_s = step_s
        self._stop = threading.Event()
        self.is_right = True
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        for number, batch in enumerate(self._loader):
            self.is_right = self.is_right and batch.tolist() == [float(number)] * 4
            if self._stop.wait(self._step_s):
                return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(SECONDS_MAX)


def trainer_when(
    pool: PoolProcesses, is_so: Callable[[dict[str, Any]], bool], seconds: float = SECONDS_MAX
) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while True:
        for trainer in pool.status()["trainers"]:
            if is_so(trainer):
                return trainer
        assert time.monotonic() < deadline, pool.status()["trainers"]
        time.sleep(0.2)


@pytest.mark.long
def test_job_keeps_only_the_workers_it_can_use(pool: PoolProcesses) -> None:
    pool.start_worker(processes=5)
    training = Training(pool, batch_s=0.05, step_s=0.05)
    try:
        seen = trainer_when(pool, lambda one: one["step_s"] is not None and one["workers"] <= 3)
        assert 1 <= seen["workers_wanted"] <= 3
        assert seen["step_s"] > 0 and seen["worker_s"] > 0
        assert 0 <= seen["worker_cpu_share"] <= 1
        assert "a batch takes" in seen["reason"]
        assert seen["queue"]["wanted_batches"] >= 2
        trainer_when(pool, lambda one: one["limited_by"] == "trainer")
    finally:
        training.stop()
    assert training.is_right


@pytest.mark.long
def test_job_limited_by_waiting_dataset_is_reported(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    training = Training(pool, batch_s=0.2, step_s=0.02)
    try:
        seen = trainer_when(pool, lambda one: one["limited_by"] == "waiting")
        assert seen["workers_wanted"] > 2
        assert seen["starved_s"] > 0
    finally:
        training.stop()
    assert training.is_right


@pytest.mark.long
@pytest.mark.parametrize("validates", [False, True])
def test_trainer_limited_job_wants_one_worker_in_every_epoch(
    pool: PoolProcesses, validates: bool
) -> None:
    """Its reported use was two to four workers, "which wait, as for storage", and it kept them.
    Each change of the verdict is seen, also one between two looks.
    """
    pool.start_worker(processes=2)
    step_s, batch_s = 0.2, 0.04
    train = DataLoader(Slow(batch_s, 14), batch_size=None, pool=pool.endpoint)
    val = DataLoader(Slow(batch_s, 10), batch_size=None, pool=pool.endpoint)
    seen = []
    for epoch in range(12):
        for _ in train:
            time.sleep(step_s)
        one = max(pool.status()["trainers"], key=lambda it: it["queue"]["delivered_batches"])
        if one["step_s"] is not None:
            seen.append((epoch, one["workers_wanted"], one["limited_by"], one["reason"]))
        if validates:
            for _ in val:
                pass
    of_training = [one for one in seen if one[0] >= 6]
    assert of_training
    assert {(wanted, limit) for _, wanted, limit, _ in of_training} == {(1, "trainer")}, seen


@pytest.mark.long
def test_unneeded_workers_move_to_another_job(pool: PoolProcesses) -> None:
    pool.start_worker(processes=5)
    modest = Training(pool, batch_s=0.02, step_s=0.1)
    hungry = Training(pool, batch_s=0.2, step_s=0.02)
    try:
        trainer_when(pool, lambda one: one["workers"] == 4)
        trainer_when(pool, lambda one: one["workers"] == 1 and one["limited_by"] == "trainer")
    finally:
        modest.stop()
        hungry.stop()
    assert modest.is_right and hungry.is_right


@pytest.mark.long
def test_idle_trainer_is_reported_as_paused(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    loader = DataLoader(Slow(0.005), batch_size=None, pool=pool.endpoint)
    batches = iter(loader)
    for _ in range(30):
        next(batches)
        time.sleep(0.01)
    seen = trainer_when(pool, lambda one: one["is_paused"])
    assert seen["queue"]["ready_batches"] > 0
    next(batches)
    trainer_when(pool, lambda one: not one["is_paused"])


@pytest.mark.long
def test_job_with_long_steps_keeps_its_worker(pool: PoolProcesses) -> None:
    pool.start_worker(processes=1)
    training = Training(pool, batch_s=0.01, step_s=3.0)
    try:
        trainer_when(pool, lambda one: one["workers"] == 1 and one["step_s"] is not None)
        for _ in range(40):
            assert pool.status()["trainers"][0]["workers"] == 1
            time.sleep(0.25)
    finally:
        training.stop()
    assert training.is_right
