# SPDX-License-Identifier: Apache-2.0
"""How the process of a job ends, and how that is reported: a dataset's exit is an error of its
batch, and a dataset that ends its process ends no worker."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ending_datasets import (
    EXITS,
    DeafToSigterm,
    Ending,
    EndingWithItsSupervisor,
    ExitingIndices,
    ExitingSample,
    ExitingStream,
    ForkingSample,
    HangingExit,
    HoldsAnExit,
    InheritedSockets,
    Leaky,
    LeavingAChild,
    Numbers,
    Opening,
    OpensManyFiles,
    UnpickledBatch,
    exiting_collate,
    exiting_init,
)
from pool_datasets import CODE
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from test_pool_worker import wait_until_dead, wait_until_draining

from penstock import DataLoader, Pool
from penstock.errors import PenstockError, PoolWarning, WorkerError

pytestmark = pytest.mark.slow

LIMITED = ("bash", "-c", 'ulimit -n 256; exec "$0" "$@"')  # to so many open files


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """A pool with one worker, which survives the exits of its jobs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("serving"), monkeypatch):
            worker = opened.start_worker()
            yield opened
            assert worker.end() == 0


def worker_of(pool: PoolProcesses) -> Worker:
    (worker,) = (one for one in pool.processes if isinstance(one, Worker))
    return worker


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    given = {"batch_size": None, "timeout": 60, **options}
    trusts = given.pop("trust_workers", False)
    of_pool = Pool(pool.endpoint, code_paths=[CODE], trust_workers=trusts)
    return DataLoader(dataset, pool=of_pool, **given)


def expect_served(pool: PoolProcesses, count: int = 6) -> None:
    assert list(pooled(pool, Numbers(count))) == list(range(count))


def test_exit_in_user_code_fails_its_batch_only(
    serving: PoolProcesses,
) -> None:
    """`sys.exit()` in a dataset ended one worker after the other, for good and without a line; the
    trainer got the message that there was no worker, and waited for ever."""
    pool, worker = serving, worker_of(serving)
    ways: list[tuple[str, DataLoader[Any]]] = [
        *((f"^{how} in ", pooled(pool, ExitingSample(how))) for how in EXITS),
        ("in collate_fn", pooled(pool, Numbers(), batch_size=1, collate_fn=exiting_collate)),
        ("in worker_init_fn", pooled(pool, Numbers(), worker_init_fn=exiting_init)),
        ("while it was pickled", pooled(pool, UnpickledBatch(), trust_workers=True)),
        ("while it was unpickled", pooled(pool, Numbers(), sampler=ExitingIndices())),
        ("^SystemExit in ", pooled(pool, ExitingStream(), shards=1)),
    ]
    for words, loader in ways:
        with pytest.raises(WorkerError) as caught:
            list(loader)
        assert isinstance(caught.value, RuntimeError)
        assert re.search(words, str(caught.value)), str(caught.value)
        assert "Original Traceback (most recent call last)" in str(caught.value)
    with (
        pytest.raises(PenstockError, match="SystemExit: while it was unpickled"),
        pytest.warns(PoolWarning, match="does not work for this trainer"),
    ):
        list(pooled(pool, HoldsAnExit()))
    expect_served(pool)
    assert len(worker.served(1)) == 1, worker.output
    assert "another one starts" not in worker.output


def test_exit_error_names_its_sample(serving: PoolProcesses) -> None:
    batches = iter(pooled(serving, ExitingSample("SystemExit"), batch_size=2))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(WorkerError, match=r"SystemExit(?s:.)*sample 3 of the dataset"):
        next(batches)
    assert next(batches).tolist() == [4, 5]


@pytest.mark.parametrize("code", [0, 78, pytest.param(3, marks=pytest.mark.long)])
def test_job_process_exit_is_logged_and_worker_continues(
    serving: PoolProcesses, tmp_path: Path, code: int
) -> None:
    """With the exit codes 0 and 78 the worker was gone for good, without any report."""
    worker = worker_of(serving)
    before = len(worker.lines)
    assert list(pooled(serving, Ending(code, once=tmp_path))) == list(range(6))
    (line,) = worker.wait_for_lines(lambda line: "a job process of" in line, after=before)
    assert re.search(rf" of trainer [0-9a-f]{{8}} ended with exit code {code}$", line), line
    expect_served(serving)
    assert "another one starts" not in worker.output


def test_batch_that_kills_every_process_fails(pool: PoolProcesses) -> None:
    """It took down as many workers as there were, and then waited for others."""
    worker = pool.start_worker(processes=2)
    with pytest.raises(
        RuntimeError, match=r"^3 workers in a row died while making batch 3 of epoch"
    ):
        list(pooled(pool, Ending(0)))
    expect_served(pool)
    worker.wait_for_lines(lambda line: line.endswith("ended with exit code 0"), 3)
    assert "another one starts" not in worker.output


def test_batch_that_killed_the_last_worker_is_named(
    pool: PoolProcesses,
) -> None:
    """The user was asked to start workers."""
    pool.start_worker("--isolate", "none")  # its job can end the server
    with pytest.raises(RuntimeError) as caught, pytest.warns(PoolWarning, match="1 worker died"):
        list(pooled(pool, EndingWithItsSupervisor(), timeout=12))
    deaths = (
        r"1 worker died while making batch 3 of epoch 1 \(samples 3\) \(at tcp://.*; since then "
    )
    assert re.search(deaths, str(caught.value)), str(caught.value)


@pytest.mark.long
def test_child_left_by_dataset_ends_with_job_process(pool: PoolProcesses, tmp_path: Path) -> None:
    """It had the worker's port open. The new worker found its port in use, and was given up."""
    worker = pool.start_worker()
    batches = iter(pooled(pool, LeavingAChild(tmp_path)))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    worker.wait_for_lines(lambda line: line.endswith("ended with exit code 0"))
    wait_until_dead([int((tmp_path / "child").read_text())], SECONDS_MAX)
    assert list(batches) == [3, 4, 5]


@pytest.mark.long
def test_child_forked_by_dataset_exits_normally(pool: PoolProcesses) -> None:
    """It was caught as the batch's error, in a child that then continued as a worker."""
    worker = pool.start_worker()
    assert list(pooled(pool, ForkingSample())) == list(range(40, 46))
    assert len(worker.pids) == 1


@pytest.mark.long
def test_program_started_by_dataset_inherits_no_sockets(pool: PoolProcesses) -> None:
    pool.start_worker()
    assert list(pooled(pool, InheritedSockets(1))) == [0]


def test_descriptor_leak_fails_only_its_own_job(
    pool: PoolProcesses,
) -> None:
    """The worker ended with "Too many open files" as the next job started, and was given up."""
    worker = pool.start_worker(within=LIMITED)
    with pytest.raises(OSError, match="Too many open files"):
        list(pooled(pool, Leaky()))
    assert list(pooled(pool, Opening())) == list(range(6))
    assert "another one starts" not in worker.output
    assert worker.end() == 0


@pytest.mark.long
def test_job_needing_too_many_descriptors_is_rejected(pool: PoolProcesses) -> None:
    worker = pool.start_worker(within=LIMITED)
    for _ in range(2):
        with (
            pytest.raises(PenstockError, match="could not unpickle its dataset .*Too many open"),
            pytest.warns(PoolWarning, match="does not work for this trainer"),
        ):
            list(pooled(pool, OpensManyFiles()))
        expect_served(pool)
    assert "another one starts" not in worker.output
    assert worker.end() == 0


@pytest.mark.long
def test_worker_drains_despite_signal_handlers_of_dataset(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    worker = pool.start_worker()
    batches = iter(pooled(pool, DeafToSigterm(tmp_path)))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    _wait_for(tmp_path / "hangs", worker)
    worker.process.send_signal(signal.SIGTERM)
    wait_until_draining(pool)
    (tmp_path / "go").touch()
    assert next(batches) == 3
    assert worker.wait() == 0
    pool.start_worker()
    assert list(batches) == [4, 5]


@pytest.mark.long
def test_hanging_exit_handler_does_not_delay_worker_exit(pool: PoolProcesses) -> None:
    worker = pool.start_worker()
    assert list(pooled(pool, HangingExit())) == list(range(6))
    assert worker.end(signal.SIGTERM) == 0
    assert "did not exit in time and is killed" not in worker.output


def _wait_for(path: Path, worker: Worker) -> None:
    while not path.exists():
        assert worker.process.poll() is None, worker.output
        time.sleep(0.02)
