# SPDX-License-Identifier: Apache-2.0
"""A worker that is alive and makes no batches: its dataset hangs in a batch that is no longer
wanted, or in a wanted one while the worker is asked to leave."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ending_datasets import Hanging, Numbers
from pool_datasets import CODE
from pool_processes import SECONDS_MAX, PoolProcesses, Process, Worker, pool_of
from test_pool_worker import reported

from penstock import DataLoader, Pool, _pool
from penstock.pool.pool_status import PoolStatus, status_text

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def pooled(pool: PoolProcesses, dataset: Any, timeout: float = 60) -> DataLoader[Any]:
    return DataLoader(
        dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), batch_size=None, timeout=timeout
    )


def wait_until_stuck(pool: PoolProcesses) -> dict[str, Any]:
    """The status in which the pool's only worker is shown as stuck."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        status = pool.status()
        if any(worker["stuck_s"] is not None for worker in status["workers"]):
            return status
        assert time.monotonic() < deadline, status


TRAINER = """
import sys
from pathlib import Path
from ending_datasets import Hanging
from penstock import DataLoader, Pool
from pool_datasets import CODE

endpoint, how, folder = sys.argv[1:]
dataset = Hanging(how, Path(folder))
batches = iter(DataLoader(dataset, pool=Pool(endpoint, code_paths=[CODE]), batch_size=None))
print([next(batches) for _ in range(3)], flush=True)
next(batches)
"""


def wait_until_it_hangs(worker: Worker, folder: Path) -> None:
    while not (folder / "hangs").exists():
        assert worker.process.poll() is None, worker.output
        time.sleep(0.02)


def hang(pool: PoolProcesses, worker: Worker, how: str, folder: Path) -> None:
    """A job whose trainer is killed. If a trainer ends by itself, its batch is ended."""
    program = (sys.executable, "-c", TRAINER)
    environment = {**pool.environment, "PYTHONPATH": str(Path(__file__).parent)}
    trainer = Process([pool.endpoint, how, str(folder)], environment, program=program)
    pool.processes.append(trainer)
    trainer.wait_for_lines(lambda line: line == "[0, 1, 2]")
    wait_until_it_hangs(worker, folder)
    trainer.process.kill()
    trainer.wait()


@pytest.mark.parametrize("how", ["sleep", pytest.param("call", marks=pytest.mark.long)])
def test_worker_hanging_in_abandoned_batch_is_recovered(
    pool: PoolProcesses, tmp_path: Path, how: str
) -> None:
    """It was reported as free, and assigned to the next job, which waited for ever."""
    worker = pool.start_worker()
    hang(pool, worker, how, tmp_path)
    status = wait_until_stuck(pool)
    (stuck,) = status["workers"]
    assert stuck["assigned_to"] is None
    assert "at a batch that is no longer needed" in status_text(PoolStatus(status))
    assert list(pooled(pool, Numbers())) == list(range(6))
    (line,) = worker.wait_for_lines(lambda line: "ends a job process" in line)
    assert re.search(
        r"it worked on batch 3 of epoch 1 for \d+ s although it was no longer needed", line
    )
    assert "another one starts" not in worker.output
    assert worker.end() == 0


def test_hanging_batch_ends_with_its_closed_trainer(pool: PoolProcesses, tmp_path: Path) -> None:
    worker = pool.start_worker()
    batches = iter(pooled(pool, Hanging("call", tmp_path)))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    wait_until_it_hangs(worker, tmp_path)
    del batches
    assert list(pooled(pool, Numbers())) == list(range(6))
    assert "job process" not in worker.output
    assert worker.end() == 0


@pytest.mark.long
def test_recovered_worker_serves_the_next_job(pool: PoolProcesses, tmp_path: Path) -> None:
    worker = pool.start_worker()
    hang(pool, worker, "sleep", tmp_path)
    wait_until_stuck(pool)
    (tmp_path / "go").touch()
    assert list(pooled(pool, Numbers())) == list(range(6))
    assert "ends a job process" not in worker.output
    assert worker.end() == 0


def drain_by_signal(pool: PoolProcesses, worker: Worker) -> None:
    worker.process.send_signal(signal.SIGTERM)


def drain_by_order(pool: PoolProcesses, worker: Worker) -> None:
    (one,) = reported(pool, 1)
    assert _pool.drain_worker(pool.endpoint, None, int(one["id"], 16), SECONDS_MAX)


@pytest.mark.parametrize(
    "drain", [drain_by_signal, pytest.param(drain_by_order, marks=pytest.mark.long)]
)
def test_draining_worker_exits_after_grace_despite_hang(
    pool: PoolProcesses, tmp_path: Path, drain: Any
) -> None:
    """It stayed for as long as its dataset hung, after `penstock drain` as well as after
    SIGTERM."""
    worker = pool.start_worker("--grace", "1")
    batches = iter(pooled(pool, Hanging("call", tmp_path)))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    wait_until_it_hangs(worker, tmp_path)
    drain(pool, worker)
    assert worker.wait() == 0
    assert "after it was drained it was still making batch 3 of epoch 1" in worker.output
    assert "another one starts" not in worker.output
    (tmp_path / "go").touch()
    pool.start_worker()
    assert list(batches) == [3, 4, 5]
