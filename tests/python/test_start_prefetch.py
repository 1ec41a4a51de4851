# SPDX-License-Identifier: Apache-2.0
"""``start_prefetch()``: batches are made before ``iter()``, and the stream is unchanged.

The oracle is a program that calls ``iter()`` instead of ``start_prefetch()``.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import random
import select
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_datasets import CODE
from pool_processes import PoolProcesses, pool_of
from process_traces import children
from resumed_streams import (
    SAMPLERS,
    Augmented,
    Counted,
    Remembering,
    Shards,
    jittered,
    seed_all,
    state_after,
    take,
    through_json,
)
from torch.utils.data import Dataset, DistributedSampler

import penstock
from penstock import DataLoader, MixtureSampler, Pool, Ranks
from penstock.errors import UnsupportedError

Make = Callable[..., Any]
WAIT_S_MAX = 60.0


def begun(make: Make, is_started: bool, state: dict[str, Any] | None = None) -> Any:
    """A loader, after ``start_prefetch()`` or with the iterator that ``iter()`` gave there, and
    after subsequent draws of the program."""
    seed_all(7)
    loader = make()
    if state is not None:
        loader.load_state_dict(copy.deepcopy(state))
    if is_started:
        loader.start_prefetch()
        loader.start_prefetch()
    else:
        loader.begun = iter(loader)
    loader.drawn = [float(torch.rand(())), random.random(), float(np.random.random())]
    return loader


def streams(loader: Any, epoch_count: int = 3) -> list[Any]:
    """Of the iterator that was started, and of epochs after it; where the generators are at
    last."""
    first = loader.begun if hasattr(loader, "begun") else iter(loader)
    found = [take(first, 99)]
    for _ in range(epoch_count - 1):
        found.append(take(iter(loader), 99))
    return [*found, loader.drawn, float(torch.rand(())), random.random(), float(np.random.rand())]


MADE: dict[str, Make] = {
    "shuffled": lambda **o: DataLoader(
        Augmented(), 4, shuffle=True, collate_fn=jittered, num_workers=2, **o
    ),
    "by batch": lambda **o: DataLoader(
        Augmented(), 4, shuffle=True, num_workers=2, seeding="batch", **o
    ),
    "own generator": lambda **o: DataLoader(
        Augmented(), num_workers=2, **SAMPLERS["own generator"](), **o
    ),
    "SubsetRandomSampler": lambda **o: DataLoader(
        Augmented(), num_workers=2, **SAMPLERS["SubsetRandomSampler"](), **o
    ),
    "stateful sampler": lambda **o: DataLoader(
        Augmented(), num_workers=2, **SAMPLERS["stateful sampler"](), **o
    ),
    "mixture": lambda **o: DataLoader(
        Augmented(), 4, sampler=MixtureSampler([12, 11], [1, 2], seed=3), num_workers=2, **o
    ),
    "iterable": lambda **o: DataLoader(Shards(), 4, num_workers=2, **o),
    "stateful iterable": lambda **o: DataLoader(Remembering(), 4, num_workers=2, **o),
    "shards": lambda **o: DataLoader(
        Shards(), 4, num_workers=2, seeding="batch", shards=3, **o
    ),
    "auto": lambda **o: DataLoader(Augmented(), 4, num_workers="auto", seeding="batch", **o),
    "rank": lambda **o: DataLoader(
        Augmented(), shuffle=True, num_workers=2, ranks=Ranks(1, 2, global_batch_size=8), **o
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_started_stream_matches_iter(name: str, persistent: bool) -> None:
    def make() -> Any:
        return MADE[name](persistent_workers=persistent)

    assert streams(begun(make, True)) == streams(begun(make, False))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_resumed_started_stream_matches_iter(name: str, persistent: bool) -> None:
    def make() -> Any:
        return MADE[name](persistent_workers=persistent)

    for count in (0, 2, 99):
        state = state_after(make, count)
        started = begun(make, True, state)
        assert through_json(started.state_dict()) == state, "nothing was given since"
        assert streams(started, 2) == streams(begun(make, False, state), 2)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MADE)
def test_state_is_unchanged_by_start_prefetch(name: str) -> None:
    seed_all(7)
    before = through_json(MADE[name]().state_dict())
    started = begun(MADE[name], True)
    assert through_json(started.state_dict()) == before
    expected = streams(begun(MADE[name], False), 1)[0]
    started.load_state_dict(started.state_dict())
    assert take(iter(started), 99) == expected


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["shuffled", "by batch", "mixture", "rank", "shards"])
def test_every_epoch_may_be_started_early(name: str, persistent: bool) -> None:
    def epochs(is_started: bool) -> list[Any]:
        seed_all(7)
        loader = MADE[name](persistent_workers=persistent)
        found = []
        for _ in range(3):
            if is_started:
                loader.start_prefetch()
            found.append(take(iter(loader), 99))
        return found

    assert epochs(True) == epochs(False)


class CountsMadeSamples(Dataset[int]):
    """Counts the samples that its workers made."""

    def __init__(self) -> None:
        self.made = multiprocessing.get_context("fork").Semaphore(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.made.release()
        return index


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_made_before_iter(persistent: bool) -> None:
    dataset = CountsMadeSamples()
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent)
    loader.start_prefetch()
    for _ in range(8):  # samples of the four batches that two workers are asked for
        assert dataset.made.acquire(timeout=WAIT_S_MAX)
    assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, 40, 2)]


class ReportsSamplesByPipe(Dataset[int]):
    """Writes a byte for each sample. Can be sent to a pool's workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        pipe = os.open(self.path, os.O_WRONLY)
        os.write(pipe, b".")
        os.close(pipe)
        return index


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.slow
def test_pool_makes_batches_before_iter(pool: PoolProcesses, tmp_path: Path) -> None:
    pool.start_worker()
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        dataset = ReportsSamplesByPipe(tmp_path / "pipe")
        loader = DataLoader(dataset, 2, pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60)
        loader.start_prefetch()
        for _ in range(4):
            assert select.select([pipe], [], [], WAIT_S_MAX)[0]
            os.read(pipe, 1)
        assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, 40, 2)]
    finally:
        os.close(pipe)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_started_pool_stream_matches_iter(steady_pool: PoolProcesses, persistent: bool) -> None:

    def make() -> Any:
        of_pool = Pool(steady_pool.endpoint, code_paths=[CODE])
        return DataLoader(Augmented(), 4, shuffle=True, pool=of_pool, persistent_workers=persistent)

    assert streams(begun(make, True)) == streams(begun(make, False))
    state = state_after(make, 2)
    assert streams(begun(make, True, state), 2) == streams(begun(make, False, state), 2)
    started = begun(make, True)
    started.prefetch_bytes = 1 << 20
    assert streams(started) == streams(begun(make, False))


def set_collate(loader: Any) -> None:
    loader.collate_fn = jittered


def set_prefetch_bytes(loader: Any) -> None:
    loader.prefetch_bytes = 1 << 20


def reseed(loader: Any) -> None:
    loader.generator.manual_seed(11)


def set_workers(loader: Any) -> None:
    loader.num_workers = 0


def pickled(loader: Any) -> None:
    copy.copy(loader)


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "collate_fn": ("by batch", set_collate),
    "option of penstock's": ("shuffled", set_prefetch_bytes),
    "option, iterable": ("iterable", set_prefetch_bytes),
    "option, sampler": ("stateful sampler", set_prefetch_bytes),
    "option, mixture": ("mixture", set_prefetch_bytes),
    "option, rank": ("rank", set_prefetch_bytes),
    "generator": ("own generator", reseed),
    "no workers": ("by batch", set_workers),
    "copied": ("own generator", pickled),
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("is_drawn_since", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_start_prefetch_take_effect(change: str, is_drawn_since: bool) -> None:
    """As if the loader had been changed before the draws were made."""
    name, make_change = CHANGES[change]

    def epochs(is_started: bool, state: dict[str, Any] | None) -> list[Any]:
        seed_all(7)
        loader = MADE[name]()
        if state is not None:
            loader.load_state_dict(state)
        if is_started:
            loader.start_prefetch()
            if is_drawn_since:
                torch.rand(3)
        make_change(loader)
        first = take(iter(loader), 99)
        return [first, [] if is_drawn_since else take(iter(loader), 99)]

    assert epochs(True, None) == epochs(False, None)
    state = state_after(MADE[name], 2)
    assert epochs(True, state) == epochs(False, state)


@pytest.mark.parametrize("set_after", [True, False])
def test_set_epoch_after_start_prefetch_takes_effect(set_after: bool) -> None:
    dataset = Counted()

    def indices(is_started: bool, sampler: Any) -> list[Any]:
        loader = DataLoader(dataset, 4, sampler=sampler, num_workers=1)
        if is_started:
            loader.start_prefetch()
        sampler.set_epoch(3)
        return [batch.tolist() for batch in loader]

    for make in (
        lambda: DistributedSampler(dataset, num_replicas=2, rank=1),
        lambda: MixtureSampler([10, 13]),
    ):
        assert indices(True, make()) == indices(False, make())


def test_unchanged_started_iterator_is_reused_by_iter() -> None:
    loader = DataLoader(Counted(), 4, shuffle=True, num_workers=1)
    loader.start_prefetch()
    pids = children()
    torch.rand(1)
    loader.start_prefetch()
    iterator = iter(loader)
    assert children() == pids
    assert len(list(iterator)) == 6


def test_state_loaded_after_start_prefetch_takes_effect() -> None:
    def make() -> Any:
        return DataLoader(Augmented(), 4, shuffle=True, num_workers=1)

    state = state_after(make, 2)
    started = begun(make, True)
    started.load_state_dict(state)
    assert take(iter(started), 99) == streams(begun(make, False, state), 1)[0]


def test_deleted_started_loader_leaves_nothing() -> None:
    loader = DataLoader(Counted(), 4, num_workers=2)
    loader.start_prefetch()
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None  # and a fixture looks for its processes and its memory


def test_pickled_started_loader_gives_the_same_epoch() -> None:
    seed_all(7)
    loader = DataLoader(Counted(), num_workers=1, **SAMPLERS["own generator"]())
    loader.start_prefetch()
    other = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]


def test_forked_child_starts_its_own_workers() -> None:
    loader = DataLoader(Counted(), 4, num_workers=1, persistent_workers=False)
    loader.start_prefetch()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if len(list(loader)) == 6 else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(loader)) == 6


def test_start_prefetch_after_abandoned_epoch_starts_anew() -> None:
    loader = DataLoader(Counted(), 4, num_workers=1, persistent_workers=True)
    first = next(iter(loader))
    state = loader.state_dict()
    loader.start_prefetch()
    assert loader.state_dict() == state
    assert next(iter(loader)).tolist() == first.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_thread")
def test_model_offloaded_after_start_prefetch_is_cut() -> None:
    """Batches requested before the model was known arrive without its tensors."""
    rows = torch.randint(0, 256, (48, 3, 8), dtype=torch.uint8)

    def results(is_started: bool) -> list[Any]:
        torch.manual_seed(7)
        loader = DataLoader(torch.utils.data.TensorDataset(rows), 2, shuffle=True, num_workers=1)
        model: Any = Scaled()
        if is_started:
            loader.start_prefetch()
            model = penstock.offload(model, loader, cut="maximal")
        else:
            loader.begun = iter(loader)
        with torch.no_grad():
            found = [model(batch[0]).tolist() for batch in getattr(loader, "begun", loader)]
        if is_started:
            assert loader.plan.moved, "the plan was found in this epoch"
        return found

    assert results(True) == results(False)


class Scaled(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.float() / 255 - 0.5).flatten(1)


def test_start_prefetch_without_workers_raises() -> None:
    with pytest.raises(UnsupportedError, match="got num_workers=0 and no pool, with which each"):
        DataLoader(Counted()).start_prefetch()
    pipe = torch.utils.data.datapipes.map.SequenceWrapper([1, 2])
    with pytest.raises(UnsupportedError, match="does not support datapipes"):
        DataLoader(pipe, num_workers=1).start_prefetch()


def test_start_prefetch_mid_epoch_raises() -> None:
    loader = DataLoader(Counted(), 4, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="no iterator of this loader is in the middle of an epoch"):
        loader.start_prefetch()
    del iterator
    loader.start_prefetch()
    assert len(list(loader)) == 6
