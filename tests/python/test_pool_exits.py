# SPDX-License-Identifier: Apache-2.0
"""Exits and interrupts in the users' code at a pool's worker: each is an error of its batch."""

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
    ExitingIndices,
    ExitingSample,
    ExitingStream,
    ForkingSample,
    HoldsAnExit,
    Numbers,
    UnpickledBatch,
    exiting_collate,
    exiting_init,
)
from pool_datasets import CODE
from pool_processes import PoolProcesses, Worker, pool_of
from test_pool_worker import wait_until_draining

from penstock import DataLoader
from penstock.errors import PenstockError, PoolWarning, WorkerError

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    given = {"batch_size": None, "timeout": 60, **options}
    return DataLoader(dataset, pool=pool.endpoint, code_paths=[CODE], **given)


def expect_served(pool: PoolProcesses, count: int = 6) -> None:
    assert list(pooled(pool, Numbers(count))) == list(range(count))


def test_an_exit_in_the_users_code_is_an_error_of_its_batch_and_ends_no_worker(
    pool: PoolProcesses,
) -> None:
    """`sys.exit()` in a dataset ended one worker after the other, for good and without a line; the
    trainer was told that there was no worker, and waited for ever."""
    worker = pool.start_worker()
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
    assert worker.end() == 0


def test_an_exit_names_its_sample(pool: PoolProcesses) -> None:
    pool.start_worker()
    batches = iter(pooled(pool, ExitingSample("SystemExit"), batch_size=2))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(WorkerError, match=r"SystemExit(?s:.)*sample 3 of the dataset"):
        next(batches)
    assert next(batches).tolist() == [4, 5]


@pytest.mark.long
def test_a_child_that_a_dataset_forks_exits_as_programs_do(pool: PoolProcesses) -> None:
    """It was caught as the batch's error, in a child that then went on as a worker."""
    worker = pool.start_worker()
    assert list(pooled(pool, ForkingSample())) == list(range(40, 46))
    assert len(worker.pids) == 1


@pytest.mark.long
def test_a_worker_drains_whatever_handlers_its_dataset_has_set(
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


def _wait_for(path: Path, worker: Worker) -> None:
    while not path.exists():
        assert worker.process.poll() is None, worker.output
        time.sleep(0.02)
