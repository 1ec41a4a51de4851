# SPDX-License-Identifier: Apache-2.0
"""Pools with tight limits: /dev/shm of 64 MB, as in containers, and 256 open files. Jobs are
served, or end with an error that names the scarce resource."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ending_datasets import Numbers
from namespaces import NotHere, tiny_folder
from pool_datasets import CODE
from pool_processes import PoolProcesses, Process, pool_of
from torch.utils.data import Dataset

from penstock import DataLoader, Pool
from penstock.errors import PenstockError, PoolWarning

pytestmark = pytest.mark.slow

SHARED_MEMORY_BYTES = 64 << 20
FEW_FILES = ("prlimit", "--nofile=256:256", "--")
SHORT_JOBS = str(Path(__file__).with_name("short_jobs.py"))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture
def small_shared_memory() -> tuple[str, ...]:
    """The start of a command whose /dev/shm has 64 MB."""
    try:
        return (*tiny_folder("/dev/shm", SHARED_MEMORY_BYTES).within,)
    except NotHere as err:
        pytest.skip(str(err))


def pooled(pool: PoolProcesses, dataset: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset, batch_size=None, pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60
    )


class Large(Dataset[torch.Tensor]):
    """Each batch takes more than all of that /dev/shm."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SHARED_MEMORY_BYTES + (8 << 20),), index, dtype=torch.uint8)


class Sharing(Numbers):
    """Has a tensor in shared memory, as datasets do to share it with subprocesses."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shared = torch.zeros(2 * SHARED_MEMORY_BYTES, dtype=torch.uint8).share_memory_()


class Hoarding(Numbers):
    """Uses up its process's descriptors."""

    held: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> Any:
        with contextlib.suppress(OSError):
            while True:
                self.held = (*self.held, os.open(os.devnull, os.O_RDONLY))
        return torch.full((1 << 18,), index)


def test_batches_larger_than_dev_shm_arrive(
    pool: PoolProcesses, small_shared_memory: tuple[str, ...]
) -> None:
    worker = pool.start_worker(within=small_shared_memory)
    for index, batch in enumerate(pooled(pool, Large())):
        assert torch.equal(batch, Large()[index])
    assert "another one starts" not in worker.output


@pytest.mark.long
def test_job_exceeding_dev_shm_fails_and_next_job_is_served(
    pool: PoolProcesses, small_shared_memory: tuple[str, ...]
) -> None:
    worker = pool.start_worker(within=small_shared_memory)
    with (
        pytest.raises(PenstockError, match="unable to allocate shared memory.*No space left"),
        pytest.warns(PoolWarning, match="does not work for this trainer"),
    ):
        list(pooled(pool, Sharing()))
    assert list(pooled(pool, Numbers())) == list(range(6))
    assert "another one starts" not in worker.output


def test_jobs_run_with_a_limit_of_256_open_files(pool: PoolProcesses) -> None:
    worker = pool.start_worker(within=FEW_FILES, processes=2)
    environment = {**pool.environment, "PENSTOCK_POOL": pool.endpoint}
    program = (sys.executable, SHORT_JOBS)
    trainer = Process(["1", "3"], environment, within=FEW_FILES, program=program)
    pool.processes.append(trainer)
    assert trainer.wait() == 0, trainer.output
    assert trainer.output.count("is done") == 3
    assert any("can have 256 files open, and " in line for line in worker.lines), worker.output
    assert "another one starts" not in worker.output


def test_job_process_out_of_descriptors_still_delivers(pool: PoolProcesses) -> None:
    """There is none for the shared memory that would hold them."""
    worker = pool.start_worker(within=FEW_FILES)
    for index, batch in enumerate(pooled(pool, Hoarding())):
        assert torch.equal(batch, torch.full((1 << 18,), index))
    assert list(pooled(pool, Numbers())) == list(range(6))
    assert "another one starts" not in worker.output
