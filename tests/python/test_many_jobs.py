# SPDX-License-Identifier: Apache-2.0
"""Many short jobs in quick succession, of several trainers that share the workers of a pool."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import process_traces
import pytest
from pool_processes import PoolProcesses, Process, Worker, pool_of, wait_until

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("short_jobs.py"))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def start_trainer(pool: PoolProcesses, first: int, count: int) -> Process:
    program = (sys.executable, PROGRAM)
    environment = {**pool.environment, "PENSTOCK_POOL": pool.endpoint}
    trainer = Process([str(first), str(count)], environment, program=program)
    pool.processes.append(trainer)
    return trainer


class Lasting:
    """The pool workers' processes that outlive every job, and their resources between two jobs."""

    def __init__(self, worker: Worker) -> None:
        self.servers = sorted(set(worker.pids))
        self.warm = [pid for server in self.servers for pid in process_traces.children(server)]
        self.held = self.hold()

    def jobs(self) -> list[int]:
        return [pid for warm in self.warm for pid in process_traces.children(warm)]

    def hold(self) -> dict[int, int]:
        """How many descriptors each has. Only root can see a server's descriptors."""
        shown = [*self.warm, *(self.servers if os.geteuid() == 0 else [])]
        return {pid: len(process_traces.descriptors(pid)) for pid in shown}

    def expect_as_before(self, worker: Worker) -> None:
        wait_until(lambda: self.jobs() == [], self.jobs)
        assert sorted(set(worker.pids)) == self.servers, worker.output
        assert "another one starts" not in worker.output
        # Connections of trainers that have left are closed when their ends are noticed.
        wait_until(lambda: not self.grown(), self.grown)

    def grown(self) -> dict[int, tuple[int, int]]:
        """The processes that hold more than before."""
        now = self.hold()
        return {pid: (held, now[pid]) for pid, held in self.held.items() if now[pid] > held}


def run_many(pool: PoolProcesses, *, trainer_count: int, job_count: int) -> None:
    """Run the trainers concurrently, and check their results."""
    shared_before = set(os.listdir(process_traces.SHARED_MEMORY))
    worker = pool.start_worker(processes=2)
    wait_until(lambda: len(pool.status()["workers"]) == 2, pool.status)
    lasting = Lasting(worker)
    trainers = [
        start_trainer(pool, 1 + job_count * number, job_count) for number in range(trainer_count)
    ]
    codes = [trainer.wait() for trainer in trainers]
    output = "\n".join(trainer.output for trainer in trainers)
    assert codes == [0] * trainer_count, output
    assert output.count("is done") == trainer_count * job_count
    lasting.expect_as_before(worker)
    assert not any((pool.folder / "tmp").glob("penstock-code-*/*"))
    new_files = set(os.listdir(process_traces.SHARED_MEMORY)) - shared_before
    assert process_traces.unused_files(new_files) == []
    assert worker.end() == 0


def test_few_jobs_of_two_trainers_match_torch_and_leave_nothing(
    pool: PoolProcesses,
) -> None:
    run_many(pool, trainer_count=2, job_count=3)


@pytest.mark.long
def test_many_jobs_of_four_trainers_match_torch_and_leave_nothing(
    pool: PoolProcesses,
) -> None:
    run_many(pool, trainer_count=4, job_count=12)
