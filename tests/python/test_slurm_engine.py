# SPDX-License-Identifier: Apache-2.0
"""Workers as jobs of Slurm's own daemons: the stream stays exact whatever becomes of the jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_pools import Elastic, expected
from pool_processes import SECONDS_MAX
from slurm_cluster import MISSING, SlurmCluster

from penstock.engines.engine import EngineRefusal, EngineTrouble, WorkerCommand, WorkerState
from penstock.engines.slurm_engine import SlurmEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
]


class SlurmPool(Elastic):
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = SlurmCluster(folder / "slurm")
        for name, value in self.cluster.environment.items():
            monkeypatch.setenv(name, value)
        super().__init__(folder, monkeypatch, "--partition", "harvest", title="slurm")

    def jobs(self, state: str = "RUNNING") -> list[str]:
        lines = self.cluster.ask("squeue", "--noheader", "--format=%j %T").splitlines()
        return [line.split()[0] for line in lines if line.split()[1] == state]

    def has_workers(self, count: int) -> dict[str, Any]:
        return self.status_when(lambda status: len(status["workers"]) == count)

    def close(self) -> None:
        self.cluster.close()
        self.pool.close()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmPool]:
    one = SlurmPool(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def test_jobs_come_with_a_training_and_go_with_it(slurm: SlurmPool) -> None:
    up = slurm.up("--max", "3", "--idle", "1")
    assert slurm.jobs() == []
    batches = [batch.tolist() for batch in slurm.loader(200)]
    assert batches == expected(200)
    slurm.status_when(lambda _: slurm.jobs() == [])
    down = slurm.down()
    assert down.wait() == 0, down.output
    assert up.wait() == 0, up.output


@pytest.mark.long
def test_a_job_that_is_cancelled_is_replaced(slurm: SlurmPool) -> None:
    slurm.up("--min", "2", "--max", "2")
    slurm.has_workers(2)
    batches = iter(slurm.loader(400))
    given = [next(batches).tolist() for _ in range(5)]
    before = slurm.jobs()
    slurm.cluster.ask("scancel", "--signal=KILL", "--full", f"--name={before[0]}")
    given += [batch.tolist() for batch in batches]
    assert given == expected(400)
    slurm.status_when(lambda _: len(slurm.jobs()) == 2 and before[0] not in slurm.jobs())


def test_training_on_the_same_nodes_preempts_workers(slurm: SlurmPool) -> None:
    slurm.up("--min", "2", "--max", "2")
    slurm.has_workers(2)
    before = set(slurm.jobs())
    batches = iter(slurm.loader(400))
    given = [next(batches).tolist() for _ in range(5)]
    train = slurm.cluster.ask(
        "sbatch", "--parsable", "--partition=train", "--nodes=2", "--ntasks=4", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 3",
    ).strip()  # fmt: skip
    slurm.status_when(lambda _: not before & set(slurm.jobs()))
    given += [batch.tolist() for batch in batches]
    assert given == expected(400)
    slurm.status_when(lambda _: train not in slurm.jobs() and len(slurm.jobs()) >= 2)
    slurm.has_workers(2)


@pytest.mark.long
def test_what_the_nodes_have_no_room_for_waits(slurm: SlurmPool) -> None:
    slurm.up("--min", "6", "--max", "6")
    status = slurm.status_when(lambda status: (status["engine"] or {}).get("running") == 4)
    assert status["engine"]["starting"] == 2
    assert len(slurm.jobs("PENDING")) == 2


def engine_of(slurm: SlurmPool, **options: Any) -> SlurmEngine:
    command = WorkerCommand("tcp://127.0.0.1:9", None, 60.0)
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


def test_a_controller_of_slurm_that_is_gone_is_trouble(slurm: SlurmPool) -> None:
    engine = engine_of(slurm)
    slurm.cluster.kill_node("slurmctld")
    with pytest.raises(EngineTrouble, match="squeue"):
        engine.workers()
