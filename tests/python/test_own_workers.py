# SPDX-License-Identifier: Apache-2.0
"""A trainer's local workers in addition to a pool: their batches are in memory that both processes
map."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from pool_datasets import CODE, Augmented, digests
from pool_processes import PoolProcesses, pool_of
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader as TorchDataLoader

import penstock
from penstock import DataLoader, Pool
from penstock.errors import PoolWarning

pytestmark = pytest.mark.slow

SILENCE_S = 2.5  # longer than a trainer waits for a worker


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    """A controller without workers."""
    yield from pool_of(tmp_path, monkeypatch)


class Numbered(Dataset[torch.Tensor]):
    """Samples of 64 KiB, each full of its number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16_384,), float(index))


def loader_with_own_worker(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), num_workers=1, timeout=60, **options
    )


def own_pids() -> list[int]:
    # In addition to them there may be a process in which other tests run.
    pids = [process.pid for process in multiprocessing.active_children() if process.daemon]
    assert pids
    return [pid for pid in pids if pid is not None]


def mapped_files(pid: int | str) -> dict[range, str]:
    """By range of addresses, the inode of a memory-backed file that the process maps."""
    found = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/memfd:"):
            start, end = place.split("-")
            found[range(int(start, 16), int(end, 16))] = inode
    return found


def is_shared_with(tensor: torch.Tensor, pid: int) -> bool:
    inodes = [inode for place, inode in mapped_files("self").items() if tensor.data_ptr() in place]
    return bool(inodes) and inodes[0] in mapped_files(pid).values()


def numbers_of(batch: torch.Tensor) -> list[float]:
    assert bool((batch == batch[:, :1]).all())
    return [float(number) for number in batch[:, 0]]


def test_own_worker_batches_are_shared_memory(pool: PoolProcesses) -> None:
    found = []
    for batch in loader_with_own_worker(pool, Numbered(64), batch_size=4):
        (pid,) = own_pids()
        assert is_shared_with(batch, pid)
        found += numbers_of(batch)
    assert found == list(range(64))


def test_own_workers_of_pool_loader_match_local_loader(pool: PoolProcesses) -> None:
    dataset = Augmented(60)
    alone = DataLoader(dataset, batch_size=4, shuffle=True, seeding="batch")
    torch.manual_seed(3)
    expected = [digests(alone) for _ in range(2)]
    loader = loader_with_own_worker(
        pool, dataset, batch_size=4, shuffle=True, persistent_workers=True
    )
    torch.manual_seed(3)
    assert [digests(loader) for _ in range(2)] == expected


def test_forkserver_workers_get_the_keys_of_the_trainer(pool: PoolProcesses) -> None:
    """The fork server's environment is older than the test's XDG_RUNTIME_DIR."""
    loader = loader_with_own_worker(
        pool, Numbered(8), batch_size=2, multiprocessing_context="forkserver"
    )
    assert [numbers_of(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.long
def test_kept_batches_are_not_overwritten(pool: PoolProcesses) -> None:
    kept = list(loader_with_own_worker(pool, Numbered(200), batch_size=2))
    assert [numbers_of(batch) for batch in kept] == [[i, i + 1.0] for i in range(0, 200, 2)]
    kept[0].fill_(-1.0)
    assert numbers_of(kept[1]) == [2.0, 3.0]


@pytest.mark.long
def test_batches_of_any_size_arrive_unchanged(pool: PoolProcesses) -> None:
    """From none at all to more than two slabs hold."""
    sizes = [1, 5_000_000, 0, 300, 40_000_000, 7, 1_000_000, 1]
    dataset = [torch.full((size,), size % 251, dtype=torch.uint8) for size in sizes]
    found = list(loader_with_own_worker(pool, dataset, batch_size=None))
    for tensor, size in zip(found, sizes, strict=True):
        assert torch.equal(tensor, torch.full((size,), size % 251, dtype=torch.uint8))


@pytest.mark.long
def test_stopped_worker_continues_the_stream(pool: PoolProcesses) -> None:
    """The trainer opens a new connection to it. Answers on the old one are sent again."""
    loader = loader_with_own_worker(pool, Numbered(120), batch_size=2, prefetch_factor=4)
    found = []
    for count, batch in enumerate(loader):
        if count in (5, 20):
            (pid,) = own_pids()
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SILENCE_S)
            os.kill(pid, signal.SIGCONT)
        found += numbers_of(batch)
    assert found == list(range(120))


@pytest.mark.long
def test_stopped_trainer_continues_the_stream(pool: PoolProcesses) -> None:
    """Its worker has given it up, and batches that were handed over are requested again."""
    loader = loader_with_own_worker(pool, Numbered(120), batch_size=2, prefetch_factor=4)
    batches = iter(loader)
    found = numbers_of(next(batches))
    sleeper = os.fork()
    if sleeper == 0:
        trainer = os.getppid()
        os.kill(trainer, signal.SIGSTOP)
        time.sleep(SILENCE_S)
        os.kill(trainer, signal.SIGCONT)
        os._exit(0)
    os.waitpid(sleeper, 0)
    for batch in batches:
        found += numbers_of(batch)
    assert found == list(range(120))


def test_batch_survives_the_kill_of_its_worker(pool: PoolProcesses) -> None:
    batches = iter(loader_with_own_worker(pool, Numbered(64), batch_size=2))
    first = next(batches)
    for pid in own_pids():
        os.kill(pid, signal.SIGKILL)
    pool.start_worker()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)  # that it ended, if that is detected in time
        rest = [number for batch in batches for number in numbers_of(batch)]
    assert numbers_of(first) == [0.0, 1.0]
    assert rest == list(range(2, 64))


@pytest.mark.long
def test_forked_child_reads_batch_held_by_parent(pool: PoolProcesses) -> None:
    loader = loader_with_own_worker(pool, Numbered(200), batch_size=2)
    batches = iter(loader)
    held = next(batches)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has received all others
        os._exit(0 if numbers_of(held) == [0.0, 1.0] else 1)
    os.close(reader)
    del held
    rest = [number for batch in batches for number in numbers_of(batch)]
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    assert rest == list(range(2, 200))


@pytest.mark.long
def test_no_arena_stays_mapped_after_the_loader(pool: PoolProcesses) -> None:
    before = len(process_traces.arena_mappings())
    loader = loader_with_own_worker(pool, Numbered(40), batch_size=2)
    for batch in loader:
        del batch
    del loader
    gc.collect()
    assert len(process_traces.arena_mappings()) == before


def test_pool_and_own_workers_serve_one_stream(pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = loader_with_own_worker(pool, Numbered(400), batch_size=2)
    ways = set()
    found = []
    for batch in loader:
        ways.add(is_shared_with(batch, own_pids()[0]))
        found += numbers_of(batch)
        time.sleep(0.002)
    assert found == list(range(400))
    assert ways == {True, False}, "one of both made no batch"


@pytest.mark.long
def test_cut_runs_in_own_workers(pool: PoolProcesses) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16_384, 4)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.linear((batch * 0.5).relu().cos())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Model()
    expected = [model(batch) for batch in TorchDataLoader(Numbered(24), batch_size=2)]
    loader = loader_with_own_worker(pool, Numbered(24), batch_size=2)
    offloaded = penstock.offload(model, loader, cut="maximal")
    found = [offloaded(batch) for batch in loader]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert loader.stats().boundary_batches > 0
