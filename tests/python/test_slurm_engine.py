# SPDX-License-Identifier: Apache-2.0
"""What is Slurm's alone beside the contract of engines: its states, its words, its arrays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_pools import SlurmPool, needs_slurm
from pool_processes import SECONDS_MAX

from penstock.engines.engine import EngineRefusal, EngineTrouble, WorkerCommand, WorkerState
from penstock.engines.slurm_engine import SlurmEngine

pytestmark = [pytest.mark.slow, needs_slurm]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmPool]:
    one = SlurmPool(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.long
def test_what_the_nodes_have_no_room_for_waits(slurm: SlurmPool) -> None:
    slurm.up("--min", "6", "--max", "6")
    status = slurm.status_when(lambda status: (status["engine"] or {}).get("running") == 4)
    assert status["engine"]["starting"] == 2
    assert len(slurm.jobs("PENDING")) == 2


def engine_of(
    slurm: SlurmPool, controller: str = "tcp://127.0.0.1:9", **options: Any
) -> SlurmEngine:
    command = WorkerCommand(controller, None, 60.0)
    return SlurmEngine(command, "pk-test-", slurm.state, **options)


def test_what_slurm_refuses_is_told_in_its_words(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, partition="nowhere")
    with pytest.raises(EngineRefusal, match="sbatch ended with 1: .*invalid partition"):
        engine.spawn(["pk-test-1"])
    assert engine.workers() == {}


def test_a_job_that_waits_is_starting_and_can_be_stopped(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, partition="harvest", cpus=2)
    slurm.cluster.ask("scontrol", "update", "partition=harvest", "state=DOWN")
    engine.spawn(["pk-test-1", "pk-test-2"])
    assert engine.workers() == dict.fromkeys(["pk-test-1", "pk-test-2"], WorkerState.STARTING)
    engine.stop("pk-test-1", at_once=False)
    assert [*engine.workers()] == ["pk-test-2"]
    engine.stop("pk-test-1", at_once=True)


@pytest.mark.long
def test_many_workers_are_an_array_of_jobs(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, partition="harvest")
    names = [f"pk-test-{number}" for number in range(1995, 2004)]  # beyond the tasks of an array
    engine.spawn(names)
    assert {*engine.workers()} == {*names}
    lines = slurm.cluster.ask("squeue", "--noheader", "--format=%F", "--array").split()
    assert len({*lines}) == 1
    deadline = time.monotonic() + SECONDS_MAX
    while WorkerState.RUNNING not in engine.workers().values():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running = [name for name, one in engine.workers().items() if one == WorkerState.RUNNING]
    for name in [*running, names[-1]]:
        engine.stop(name, at_once=True)
    while any(name in engine.workers() for name in [*running, names[-1]]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_task_of_an_array_leaves_its_last_words(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, "no-address", partition="harvest")
    names = [f"pk-test-{number}" for number in range(95, 103)]
    engine.spawn(names)
    deadline = time.monotonic() + SECONDS_MAX
    while engine.workers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for name in names:
        assert "no-address" in engine.last_words(name)
    assert engine.last_words("pk-test-103") == ""


@pytest.mark.long
def test_a_controller_of_slurm_that_is_gone_is_trouble(slurm: SlurmPool) -> None:
    engine = engine_of(slurm)
    slurm.cluster.kill_node("slurmctld")
    with pytest.raises(EngineTrouble, match="squeue"):
        engine.workers()
