# SPDX-License-Identifier: Apache-2.0
"""num_workers="auto": the number is chosen from measurements, and the log gives the reason."""

from __future__ import annotations

import logging
import re
import time
import warnings
from typing import Any

import pytest
from scheduled_workers import Augmented, Shard, measured

from penstock import DataLoader
from penstock.tuning import worker_tuner
from penstock.tuning.process_resources import usable_cpus
from penstock.tuning.worker_tuner import AutomaticCount, WorkerTuner


class Sleeping(Augmented):
    def work(self) -> None:
        time.sleep(0.01)


class Computing(Augmented):
    def work(self) -> None:
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass


SENTENCE = re.compile(
    r"\d+ workers?: .*the trainer waited \d+% of the time.*; a batch takes \S+ m?s of a worker"
    r"(, \d+% of it on a CPU,)? and \S+ m?s of the trainer, and the process may use \d+ CPUs?"
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("is_persistent", [False, True])
def test_waiting_dataset_gets_more_workers_and_a_logged_reason(
    is_persistent: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_tuner, "cpu_seconds", lambda pids: 0.0)
    caplog.set_level(logging.INFO, "penstock")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This DataLoader will create")
        loader = measured(Sleeping(), batch_size=2, shuffle=True, persistent_workers=is_persistent)
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert re.match(r"\d+ workers: the trainer waited \d\d% of the time for [12];", said[0])
    assert all(map(SENTENCE.fullmatch, said))
    choice = loader.worker_choice
    assert SENTENCE.fullmatch(str(choice))
    assert loader.stats().worker_choice == choice
    assert choice.workers == loader.num_workers
    assert choice.measured.cpu_share == 0
    assert choice.limit >= max(2, usable_cpus())


@pytest.mark.slow
def test_compute_bound_dataset_gets_at_most_one_worker_per_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine, computing workers are on a CPU for only a part of their time.
    monkeypatch.setattr(worker_tuner, "cpu_seconds", lambda pids: 2 * len(pids) * time.monotonic())
    loader: Any = DataLoader(Computing(), batch_size=2, num_workers="auto", seeding="batch")
    loader._run.tuner = WorkerTuner(window_s=0.1)
    most = 0
    for _ in range(3):
        for _ in loader:
            most = max(most, loader.num_workers)
    choice = loader.worker_choice
    assert most <= usable_cpus()
    assert choice.measured.cpu_share >= 1
    assert SENTENCE.fullmatch(str(choice))


@pytest.mark.long
@pytest.mark.slow
def test_iterable_dataset_gets_at_most_one_worker_per_shard() -> None:
    loader = measured(Shard(200, seconds=0.003), 4, batch_size=2, shards=3)
    assert 1 <= loader.num_workers <= 3
    assert loader.worker_choice.limit == 3


@pytest.mark.slow
def test_idle_workers_are_removed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    loader: Any = DataLoader(Augmented(), batch_size=2, num_workers="auto", seeding="batch")
    loader.num_workers = AutomaticCount(4)
    loader._run.tuner = WorkerTuner(window_s=0.1)
    for _ in loader:
        time.sleep(0.02)
    assert loader.num_workers < 4
    assert re.match(r"[12] workers?: .* and 4 were idle \d+% of it;", caplog.messages[0])
