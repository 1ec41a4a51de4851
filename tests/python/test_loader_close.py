# SPDX-License-Identifier: Apache-2.0
"""``DataLoader.close()`` and ``with``: the loader's processes, threads and iterators end
immediately, while the program still holds them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Augmented
from pool_processes import PoolProcesses, clients, expect_clients, pool_of
from process_traces import children
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import penstock
from penstock import ClosedError, DataLoader, Pool

COUNT = 24


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


class Opened(IterableDataset[int]):
    """Records whether its iterator holds a resource."""

    is_open = False

    def __iter__(self) -> Iterator[int]:
        self.is_open = True
        try:
            yield from range(COUNT)
        finally:
            self.is_open = False


def new_children(before: list[int]) -> set[int]:
    return set(children()) - set(before)


def expect_closed(call: Callable[[], object]) -> None:
    with pytest.raises(ClosedError, match="requires an open DataLoader.*; make a new one"):
        call()


@pytest.mark.parametrize("workers", [0, 2])
def test_closed_loader_rejects_every_use(workers: int) -> None:
    loader = DataLoader(Rows(), num_workers=workers)
    loader.close()
    loader.close()
    expect_closed(lambda: iter(loader))
    expect_closed(lambda: loader.lookahead(1))
    expect_closed(loader.start_prefetch)
    expect_closed(lambda: loader.state_dict())
    expect_closed(lambda: loader.load_state_dict({}))
    with pytest.raises(ClosedError), loader:
        pass


@pytest.mark.slow
def test_close_ends_persistent_workers() -> None:
    before = children()
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 6
    assert len(new_children(before)) == 2
    loader.close()
    assert new_children(before) == set()
    loader.close()
    assert loader.stats().batches == 6
    assert "6 steps" in str(loader.report())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (2, False), (2, True), ("auto", False), ("auto", True)]
)
def test_iterators_in_use_raise_after_close(workers: Any, persistent: bool) -> None:
    before = children()
    loader = DataLoader(
        Rows(), 4, num_workers=workers, persistent_workers=persistent, seeding="batch"
    )
    first = iter(loader)
    batch = next(first)
    second = first if persistent else iter(loader)
    next(second)
    loader.close()
    assert new_children(before) == set()
    for _ in range(2):
        expect_closed(lambda: next(first))
        expect_closed(lambda: next(second))
    expect_closed(lambda: first.lookahead(1))
    assert batch[:, 0].tolist() == [0, 1, 2, 3], "batches that the program has stay valid"


@pytest.mark.slow
def test_loop_that_closes_its_loader_raises_at_the_next_batch() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    seen = []
    with pytest.raises(ClosedError):
        for batch in loader:
            seen.append(batch)
            loader.close()
    assert len(seen) == 1


@pytest.mark.slow
def test_close_ends_a_started_prefetch_and_undoes_its_draws() -> None:
    before = children()
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2)
    torch.manual_seed(3)
    drawn = torch.random.get_rng_state()
    loader.start_prefetch()
    assert len(new_children(before)) == 2
    loader.close()
    assert new_children(before) == set()
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.slow
def test_close_ends_a_prefetch_of_persistent_workers() -> None:
    before = children()
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=True)
    list(loader)
    loader.start_prefetch()
    loader.close()
    assert new_children(before) == set()


@pytest.mark.slow
def test_with_block_closes_the_loader_after_an_exception() -> None:
    before = children()
    with pytest.raises(LookupError), DataLoader(Rows(), num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        raise LookupError
    assert new_children(before) == set()
    expect_closed(lambda: next(batches))


@pytest.mark.slow
def test_copies_of_a_closed_loader_are_open() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    loader.close()
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        with other:
            assert len(list(other)) == 6
    expect_closed(lambda: iter(loader))


@pytest.mark.slow
def test_close_in_a_forked_child_keeps_the_workers_of_the_parent() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=2)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            loader.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(batches)) == 5
    loader.close()


def test_close_without_workers_ends_the_fetch_threads() -> None:
    def fetching() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("pk_fetch")]

    loader = DataLoader(Rows(), batch_size=4, fetch_threads=3)
    batches = iter(loader)
    next(batches)
    assert fetching()
    loader.close()
    assert fetching() == []
    expect_closed(lambda: next(batches))


@pytest.mark.parametrize("seeding", [None, "batch"])
def test_close_without_workers_closes_the_dataset_iterator(seeding: Any) -> None:
    dataset = Opened()
    loader = DataLoader(dataset, batch_size=4, seeding=seeding)
    batches = iter(loader)
    next(batches)
    assert dataset.is_open
    loader.close()
    assert not dataset.is_open
    expect_closed(lambda: next(batches))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_close_ends_a_torch_iterator(workers: int) -> None:
    before = children()
    loader = DataLoader(IterableWrapper(range(COUNT)), batch_size=4, num_workers=workers)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert new_children(before) == set()
    expect_closed(lambda: next(batches))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """A controller and one worker."""
    folder: Path = tmp_path_factory.mktemp("pool")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(folder, monkeypatch):
            opened.start_worker()
            yield opened


def pooled(pool: PoolProcesses, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Augmented(16), 4, pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_close_disconnects_from_the_pool(pool: PoolProcesses, persistent: bool) -> None:
    gc.collect()
    before = clients()
    loader = pooled(pool, persistent_workers=persistent)
    assert len(list(loader)) == 4
    expect_clients(before + 1)  # kept for the next epoch
    loader.close()
    expect_clients(before)
    loader.close()
    expect_closed(lambda: iter(loader))


@pytest.mark.slow
def test_close_within_an_epoch_disconnects_from_the_pool(pool: PoolProcesses) -> None:
    gc.collect()
    before, processes = clients(), children()
    with pooled(pool, num_workers=1) as loader:
        batches = iter(loader)
        batch = next(batches)
        expect_clients(before + 1)
    expect_clients(before)
    assert new_children(processes) == set()
    expect_closed(lambda: next(batches))
    assert batch["index"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_close_ends_a_prefetch_from_a_pool(pool: PoolProcesses) -> None:
    gc.collect()
    before = clients()
    loader = pooled(pool)
    loader.start_prefetch()
    expect_clients(before + 1)
    loader.close()
    expect_clients(before)


def test_closed_error_is_public() -> None:
    assert issubclass(ClosedError, penstock.PenstockError)
