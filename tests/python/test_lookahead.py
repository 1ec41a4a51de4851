# SPDX-License-Identifier: Apache-2.0
"""Looking at the batches to come: what is told is what comes, and nobody can tell that one looked.

The oracle is the same program that does not look.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stream_oracle import describe, next_error
from test_auto_workers import Scheduled
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.errors import UnsupportedError
from penstock.worker_tuner import WorkerTuner

EPOCHS = 2


class Augmented(Dataset[Any]):
    """Draws from each global generator of the worker."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3), random.random(), float(np.random.rand())


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class Shards(IterableDataset[Any]):
    """Some of them end long before the others."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(self.counts[info.id]):
            yield 100 * info.id + index, torch.rand(2)


class Stateful(IterableDataset[Any]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 9:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class DrawingSampler:
    """Draws from the global generator at each pull, and fills the same list again."""

    def __init__(self, count: int = 9) -> None:
        self.count = count
        self.indices = [0, 0]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.count):
            self.indices[:] = torch.randint(23, (2,)).tolist()
            yield self.indices


class StatefulSampler(DrawingSampler):
    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.place < self.count:
            self.place += 1
            yield [self.place, 2 * self.place]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class FailingSampler(DrawingSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from itertools.islice(super().__iter__(), 6)
        raise LookupError("the sampler is broken")


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def of_own_sampler() -> dict[str, Any]:
    dataset = Augmented()
    return {"dataset": dataset, "sampler": RandomSampler(dataset, generator=own_generator())}


def in_place_of_torchs(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset, "sampler": DistributedSampler(dataset, 2, 1)}


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in sequence": lambda: {"dataset": Augmented()},
    "shuffled": lambda: {"dataset": Augmented(), "shuffle": True},
    "shuffled, own generator": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "generator": own_generator(),
    },
    "own sampler": of_own_sampler,
    "drop_last": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "drop_last": True,
        "generator": own_generator(),
    },
    "whole batches": lambda: {
        "dataset": Augmented(24),
        "shuffle": True,
        "generator": own_generator(),
    },
    "short": lambda: {"dataset": Augmented(5), "shuffle": True},
    "empty": lambda: {"dataset": Augmented(0)},
    "rows": lambda: {"dataset": TensorDataset(torch.arange(50.0)), "shuffle": True},
    "single samples": lambda: {"dataset": Augmented(9), "shuffle": True, "batch_size": None},
    "failing": lambda: {"dataset": Failing(), "shuffle": True, "generator": own_generator()},
    "persistent": lambda: {"dataset": Augmented(), "shuffle": True, "persistent_workers": True},
    "persistent, own generator": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "persistent_workers": True,
        "generator": own_generator(),
    },
    "persistent and early never": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "persistent_workers": True,
        "overlap_epochs": False,
    },
    "seeded by batch": lambda: {"dataset": Augmented(), "shuffle": True, "seeding": "batch"},
    "auto": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "seeding": "batch",
        "num_workers": "auto",
        "prefetch_factor": 4,
    },
    "auto, drawing sampler": lambda: {
        "dataset": Augmented(),
        "batch_sampler": DrawingSampler(),
        "seeding": "batch",
        "num_workers": "auto",
        "prefetch_factor": 4,
    },
    "drawing sampler": lambda: {"dataset": Augmented(), "batch_sampler": DrawingSampler()},
    "drawing sampler, persistent": lambda: {
        "dataset": Augmented(),
        "batch_sampler": DrawingSampler(),
        "persistent_workers": True,
    },
    "stateful sampler": lambda: {"dataset": Augmented(), "batch_sampler": StatefulSampler()},
    "failing sampler": lambda: {"dataset": Augmented(), "batch_sampler": FailingSampler()},
    "distributed": lambda: in_place_of_torchs(Augmented()),
    "replacement": lambda: {
        "dataset": Augmented(),
        "sampler": RandomSampler(range(23), replacement=True, generator=own_generator()),
    },
    "prefetch_bytes": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "prefetch_bytes": 120,
        "prefetch_factor": 3,
    },
    "one byte": lambda: {"dataset": Augmented(), "prefetch_bytes": 1},
    "iterable": lambda: {"dataset": Shards(7, 12)},
    "iterable, uneven": lambda: {"dataset": Shards(1, 17)},
    "iterable, persistent": lambda: {"dataset": Shards(1, 11), "persistent_workers": True},
    "iterable, three": lambda: {"dataset": Shards(3, 0, 14), "num_workers": 3},
    "iterable, bytes": lambda: {"dataset": Shards(2, 11), "prefetch_bytes": 60},
    "iterable, single samples": lambda: {"dataset": Shards(2, 5), "batch_size": None},
    "iterable, shards": lambda: {"dataset": Shards(1, 9, 3), "seeding": "batch", "shards": 3},
    "iterable, stateful": lambda: {"dataset": Stateful(), "num_workers": 1, "prefetch_factor": 4},
    "three workers": lambda: {"dataset": Augmented(40), "shuffle": True, "num_workers": 3},
    "one worker": lambda: {"dataset": Augmented(), "shuffle": True, "num_workers": 1},
}
WITHOUT_INDICES = [name for name in LOADERS if name.startswith("iterable")]


def make(name: str, **others: Any) -> DataLoader[Any]:
    options = {"batch_size": 2, "num_workers": 2, **LOADERS[name](), **others}
    if "batch_sampler" in options:
        del options["batch_size"]
    return DataLoader(**options)


def seed_all() -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def everything(loader: Any) -> dict[str, str]:
    """All that a program can see at one moment beside the batches."""
    own = [getattr(holder, "generator", None) for holder in (loader, loader.sampler)]
    parts = {
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "own": [None if one is None else one.get_state().tolist() for one in own],
        "state": json.dumps(loader.state_dict()),
    }
    return {name: hashlib.sha1(repr(parts[name]).encode()).hexdigest()[:8] for name in parts}


def text_of(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


Look = Callable[[Any, int], Any]


def stream(loader: Any, look: Look, epochs: int = EPOCHS) -> list[Any]:
    """Every batch and error in order, and everything before and after each."""
    seen: list[Any] = []
    for _ in range(epochs):
        try:
            iterator = iter(loader)
        except Exception as error:
            return [*seen, text_of(error)]
        for step in itertools.count():
            look(loader, step)
            seen.append(everything(loader))
            try:
                batch = next(iterator)
            except StopIteration:
                look(loader, step)
                break
            except LookupError as error:
                seen.append(text_of(error))
                break
            except Exception as error:
                seen.append(text_of(error))
            else:
                seen.append(describe(batch))
                torch.rand(1), random.random(), np.random.rand()  # as a trainer's own
        seen.append(everything(loader))
        del iterator
    return seen


def nothing(loader: Any, step: int) -> None:
    pass


def prefetched_max(loader: Any) -> int:
    workers = 1 if type(loader.num_workers) is not int else loader.num_workers
    return int(loader.prefetch_factor * workers)


def at_most(loader: Any, step: int) -> None:
    loader.lookahead(prefetched_max(loader), lambda batch: batch)


def by_one(loader: Any, step: int) -> None:
    loader.lookahead(1, lambda batch: batch)


def now_and_then(loader: Any, step: int) -> None:
    if step % 4 == 1:
        loader.lookahead(prefetched_max(loader) - step % 2, lambda batch: batch)


def once(loader: Any, step: int) -> None:
    if step == 3:
        at_most(loader, step)


def at_indices(loader: Any, step: int) -> None:
    loader.lookahead(prefetched_max(loader))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_who_looks_sees_the_stream_of_who_does_not(name: str) -> None:
    seed_all()
    expected = stream(make(name), nothing)
    looks: list[Look] = [at_most, by_one, now_and_then, once]
    if name not in WITHOUT_INDICES:
        looks.append(at_indices)
    for look in looks:
        seed_all()
        found = stream(make(name), look)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one == other, (look.__name__, place)


def told_and_delivered(loader: Any, count: int, select: Any) -> None:
    """Asserts that what is told at each step is what comes then, to the end of the epoch."""
    told: list[list[Any]] = []
    came: list[Any] = []
    iterator = iter(loader)
    while True:
        told.append(copy.deepcopy(loader.lookahead(count, select)))
        try:
            batch = next(iterator)
        except StopIteration:
            break
        came.append(batch)
    shown = [describe(batch) for batch in came] if select is not None else None
    for step, ahead in enumerate(told):
        assert len(ahead) == min(count, len(came) - step)
        if shown is not None:
            assert [describe(batch) for batch in ahead] == shown[step : step + count]
        else:
            values = [batch[0] for batch in came[step : step + count]]
            assert [np.ravel(one).tolist() for one in ahead] == [
                torch.as_tensor(value).ravel().tolist() for value in values
            ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOADERS if "failing" not in name])
def test_what_is_told_is_what_comes(name: str) -> None:
    seed_all()
    loader = make(name)
    for count in (1, prefetched_max(loader), max(1, prefetched_max(loader) - 1)):
        told_and_delivered(loader, count, lambda batch: batch)
        if name not in WITHOUT_INDICES:
            told_and_delivered(loader, count, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["shuffled", "shuffled, own generator", "drawing sampler", "stateful sampler", "auto",
     "seeded by batch", "iterable, uneven", "iterable, stateful", "single samples",
     "prefetch_bytes"],
)  # fmt: skip
def test_who_looks_is_resumed_in_the_middle_of_an_epoch(name: str) -> None:
    def run(look: Look) -> list[Any]:
        seed_all()
        first = make(name)
        iterator = iter(first)
        for step in range(3):
            next(iterator)
            look(first, step)
        state = json.loads(json.dumps(first.state_dict()))
        del iterator
        seed_all()
        again = make(name)
        again.load_state_dict(state)
        with pytest.raises(ValueError, match="nothing iterates"):
            again.lookahead(1)
        return stream(again, look, epochs=2)

    expected = run(nothing)
    assert run(at_most) == expected
    if name not in WITHOUT_INDICES:
        assert run(at_indices) == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_indices_of_a_resumed_epoch_are_those_that_are_left(workers: int) -> None:
    for taken_count in (0, 4, 12):
        first = make("shuffled, own generator", num_workers=workers)
        iterator = iter(first)
        for _ in range(taken_count):
            next(iterator)
        again = make("shuffled, own generator", num_workers=workers)
        again.load_state_dict(first.state_dict())
        resumed = iter(again)
        told = again.lookahead(100)
        assert told == [batch[0].tolist() for batch in resumed]
        assert told == [batch[0].tolist() for batch in iterator]
        del iterator, resumed


def test_indices_without_workers_are_known_from_the_first_batch_on() -> None:
    seed_all()
    loader = make("shuffled", num_workers=0)
    expected = [batch[0].tolist() for batch in loader]
    assert loader.lookahead(1) == []
    seed_all()
    iterator = iter(loader)
    with pytest.raises(ValueError, match=r"lookahead\(2\).*before the first batch.*after next\(\)"):
        loader.lookahead(2)
    told = []
    for _ in iterator:
        told.append(loader.lookahead(5))
    assert told == [expected[step + 1 : step + 6] for step in range(len(expected))]
    in_sequence = iter(DataLoader(range(5), batch_size=2))
    assert in_sequence.lookahead(9) == [[0, 1], [2, 3], [4]]  # type: ignore[attr-defined]
    next(in_sequence)
    assert in_sequence.lookahead(1) == [[2, 3]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_looking_without_workers_draws_nothing(seeding: Any) -> None:
    def run(look: Look) -> list[Any]:
        seed_all()
        loader = make("shuffled, own generator", num_workers=0, seeding=seeding)
        return stream(loader, lambda loader, step: look(loader, step) if step else None)

    assert run(lambda loader, step: loader.lookahead(7)) == run(nothing)


def test_indices_are_known_to_the_end_of_the_epoch_with_torchs_samplers() -> None:
    loader = make("shuffled, own generator")
    iterator = iter(loader)
    told = loader.lookahead(10**9)
    assert told == [batch[0].tolist() for batch in iterator]


def test_what_is_told_belongs_to_who_asked() -> None:
    loader = make("auto, drawing sampler")
    iterator = iter(loader)
    for index in loader.lookahead(3):
        index.clear()
    assert all(loader.lookahead(3))
    assert len([*iterator]) == 9


def test_an_error_is_raised_in_its_place_and_ends_what_is_told() -> None:
    loader = DataLoader(Failing(24), batch_size=2, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    assert [len(loader.lookahead(8, lambda batch: batch)) for _ in range(2)] == [1, 1]
    next(iterator)
    assert loader.lookahead(8, lambda batch: batch) == []
    assert loader.lookahead(2) == [[2, 3], [4, 5]]
    assert "sample 3 is bad" in str(next_error(iterator))
    assert len(loader.lookahead(8, lambda batch: batch)) == 3
    assert [batch[0].tolist() for batch in itertools.islice(iterator, 3)] == [
        [4, 5],
        [6, 7],
        [8, 9],
    ]


class Dying(Dataset[int]):
    """The worker that is asked for sample 3 waits for a byte, and goes away with an exit code."""

    def __init__(self, reader: int) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.read(self.reader, 1)
            os._exit(9)
        return index


@contextlib.contextmanager
def child_deaths_unheard() -> Iterator[None]:
    """Torch's handler raises wherever the program is, which may be in the test."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.slow
def test_a_worker_that_dies_is_reported_once_in_its_place() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(Dying(reader), batch_size=None, num_workers=1, prefetch_factor=6)
        iterator = iter(loader)
        with child_deaths_unheard():
            assert loader.lookahead(3, int) == [0, 1, 2]
            os.write(writer, b".")
            assert loader.lookahead(6, int) == loader.lookahead(6, int) == [0, 1, 2]
            assert [next(iterator) for _ in range(3)] == [0, 1, 2]
            assert loader.lookahead(6, int) == []
            error = next_error(iterator)
        assert type(error) is RuntimeError and "exited unexpectedly" in str(error)
        del iterator


@pytest.mark.slow
def test_a_kept_error_keeps_no_workers() -> None:
    gone: list[int] = []
    with pipe() as (reader, writer):
        os.write(writer, b".")
        loader = DataLoader(Dying(reader), batch_size=None, num_workers=1, prefetch_factor=6)
        iterator = iter(loader)
        weakref.finalize(iterator, gone.append, 1)
        gc.disable()
        try:
            with child_deaths_unheard():
                assert len(loader.lookahead(6, int)) <= 3
            del iterator
            assert gone == [1]
        finally:
            gc.enable()


class Gated(Dataset[int]):
    """From sample 3 on each waits for a byte."""

    def __init__(self, reader: int) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index >= 3:
            os.read(self.reader, 1)
        return index


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_a_timeout_is_raised_by_who_waited_and_takes_nothing() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(
            Gated(reader), batch_size=None, num_workers=1, prefetch_factor=8, timeout=1
        )
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match=r"timed out after 1 seconds\nWorker 0 .*batch 3"):
            loader.lookahead(5, int)
        assert loader.lookahead(3, int) == [0, 1, 2]
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        assert "timed out after 1 seconds" in str(next_error(iterator))
        os.write(writer, b"." * 5)
        assert loader.lookahead(5, int) == [3, 4, 5, 6, 7]
        assert [*iterator] == [3, 4, 5, 6, 7]
        del iterator


def test_waits_for_what_is_under_way_and_no_longer() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(Gated(reader), batch_size=None, num_workers=1, prefetch_factor=8)
        iterator = iter(loader)
        assert loader.lookahead(3, int) == [0, 1, 2]  # the fourth would never come
        os.write(writer, b"." * 5)
        assert [*iterator] == [*range(8)]


def test_what_select_raises_changes_nothing() -> None:
    loader = make("in sequence")
    iterator = iter(loader)
    with pytest.raises(ZeroDivisionError):
        loader.lookahead(3, lambda batch: 1 / 0)
    assert [batch[0].tolist() for batch in iterator] == loader_indices(23)


def loader_indices(count: int) -> list[list[int]]:
    return [[*range(first, min(first + 2, count))] for first in range(0, count, 2)]


def test_select_sees_the_tensors_that_come() -> None:
    loader = make("in sequence")
    iterator = iter(loader)
    told = loader.lookahead(4, lambda batch: batch[1])
    again = loader.lookahead(2, lambda batch: batch[1])
    assert again[0] is told[0] and again[1] is told[1]
    for one in told:
        assert next(iterator)[1] is one
    values = [one.clone() for one in told]
    assert len([*iterator]) == 8
    assert all(torch.equal(one, value) for one, value in zip(told, values, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefetch_bytes": 1 << 19}], ids=["", "prefetch_bytes"])
def test_what_is_held_past_the_arena_neither_stalls_nor_changes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ARENA_BYTES", str(1 << 20))
    dataset = TensorDatasetLike(120)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, prefetch_factor=16, **options)
    kept, told = [], []
    for step, batch in enumerate(loader):
        ahead = loader.lookahead(32, lambda batch: batch)
        assert len(ahead) == min(32, 59 - step)
        told.append(ahead)
        kept.append(batch)
    assert len(kept) == 60
    for step, batch in enumerate(kept):
        assert batch[:, 0].tolist() == [2.0 * step, 2.0 * step + 1]
        assert [one[0, 0].item() for one in told[step]] == [
            2.0 * later for later in range(step + 1, min(step + 33, 60))
        ]


class TensorDatasetLike(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16384,), float(index))


def test_counts_are_of_what_was_delivered() -> None:
    loader = make("persistent", overlap_epochs=False)
    for given_count, _ in enumerate(loader, start=1):
        loader.lookahead(4, len)
        stats = loader.stats()
        assert stats.batches == given_count
        assert stats.ready + stats.outstanding == min(4, 12 - given_count)
        if given_count == 10:
            break
    assert len([*loader]) == 12
    assert (loader.stats().batches, loader.stats().stale_batches) == (22, 2)


def test_nothing_more_is_asked_for_than_without_looking() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(Gated(reader), batch_size=None, num_workers=1, prefetch_factor=3)
        iterator = iter(loader)
        assert loader.lookahead(3, int) == [0, 1, 2]
        assert loader.stats().outstanding == 0
        next(iterator)
        assert loader.stats().outstanding == 1
        os.write(writer, b"." * 5)
        assert [*iterator] == [*range(1, 8)]


def test_each_iterator_tells_its_own_and_the_loader_the_newests() -> None:
    loader = make("shuffled", shuffle=True)
    first: Any = iter(loader)
    second: Any = iter(loader)
    told = loader.lookahead(4), first.lookahead(4), second.lookahead(4)
    assert told[0] == told[2] != told[1]
    assert loader.lookahead(4, lambda batch: batch[0].tolist()) == told[2]
    assert [next(first)[0].tolist() for _ in range(4)] == told[1]
    assert [next(second)[0].tolist() for _ in range(4)] == told[2]
    del first, second
    with pytest.raises(ValueError, match="nothing iterates over this loader"):
        loader.lookahead(1)


def test_before_within_and_after_an_epoch() -> None:
    loader = make("in sequence")
    for select in (None, len):
        with pytest.raises(ValueError, match="nothing iterates over this loader; call it within"):
            loader.lookahead(1, select)
        for _ in loader:
            pass
        assert loader.lookahead(1, select) == []
        loader = pickle.loads(pickle.dumps(loader))
    persistent = make("persistent")
    assert len([*persistent]) == 12
    assert persistent.lookahead(4) == persistent.lookahead(4, len) == []
    for step, _ in enumerate(persistent):
        assert len(persistent.lookahead(4, len)) == min(4, 11 - step)


def test_a_loader_that_was_looked_at_is_copied() -> None:
    loader = make("in sequence")
    iterator = iter(loader)
    loader.lookahead(2, len)
    copied = copy.deepcopy(loader)
    with pytest.raises(ValueError, match="nothing iterates"):
        copied.lookahead(2)
    assert len([*copied]) == len([*iterator]) == 12


def test_leaving_an_epoch_drops_what_was_looked_at() -> None:
    loader = make("persistent")
    for _ in range(3):
        for _batch in loader:
            assert len(loader.lookahead(4, len)) == 4
            break
    assert sorted(index for batch in loader for index in batch[0].tolist()) == [*range(23)]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((0,), ValueError, "lookahead() was given 0 as the number of batches; at least 1"),
        ((-2, len), ValueError, "lookahead() was given -2"),
        ((1.0,), TypeError, "lookahead() was given 1.0 as the number of batches; a positive int"),
        ((True,), TypeError, "lookahead() was given True"),
        ((1, "ids"), TypeError, "lookahead() was given 'ids' as select; a function"),
        (
            (5, len),
            ValueError,
            "lookahead(5) was called, but only the next 4 batches are sure to be asked for "
            "(prefetch_factor=2 and num_workers=2); raise prefetch_factor to 3, or look less far",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, kind: type, words: str) -> None:
    loader = make("in sequence")
    iterator: Any = iter(loader)
    for call in (loader.lookahead, iterator.lookahead):
        with pytest.raises(kind, match=re.escape(words)):
            call(*arguments)
    assert len([*iterator]) == 12


@pytest.mark.parametrize(
    ("options", "arguments", "kind", "words"),
    [
        (
            {"dataset": Augmented()},
            (1, len),
            UnsupportedError,
            "asked for values with num_workers=0, where a batch is made when next() is called",
        ),
        (
            {"dataset": Augmented(), "batch_sampler": DrawingSampler()},
            (1,),
            UnsupportedError,
            "num_workers=0 and a sampler that is not torch's own",
        ),
        (
            {"dataset": Stateful()},
            (1,),
            UnsupportedError,
            "the dataset is an IterableDataset, which has none; use num_workers=1 or more, and",
        ),
        (
            {"dataset": Stateful(), "num_workers": 1},
            (1,),
            UnsupportedError,
            "the dataset is an IterableDataset, which has none; pass select=",
        ),
        (
            {"dataset": Augmented(), "num_workers": 2, "in_order": False},
            (1, len),
            UnsupportedError,
            "in_order=False, where the next batch is whichever comes first",
        ),
        (
            {"dataset": Augmented(), "batch_sampler": DrawingSampler(), "num_workers": 2},
            (5,),
            ValueError,
            "raise prefetch_factor to 3",
        ),
        (
            {"dataset": Augmented(), "num_workers": "auto", "seeding": "batch"},
            (3, len),
            ValueError,
            'only the next 2 batches are sure to be asked for (prefetch_factor=2 and num_workers="'
            'auto", which may choose 1); raise prefetch_factor to 3',
        ),
        (
            {"dataset": IterableWrapper(range(4))},
            (1,),
            UnsupportedError,
            "torch's iterator is used: the dataset is a datapipe",
        ),
    ],
)
def test_what_cannot_be_known_is_refused(
    options: dict[str, Any], arguments: Any, kind: type, words: str
) -> None:
    loader: Any = DataLoader(**options)
    iterator = iter(loader)
    with pytest.raises(kind, match=re.escape(words)):
        loader.lookahead(*arguments)
    assert len([*iterator]) == len([*DataLoader(**options)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "auto, drawing sampler"])
def test_another_number_of_workers_in_the_middle_changes_nothing(name: str) -> None:
    def run(look: Look) -> list[Any]:
        seed_all()
        loader: Any = make(name)
        loader._tuner = Scheduled([3, 1, 2, 4, 1, 3])
        return stream(loader, look)

    expected = run(nothing)
    for look in (at_most, by_one, once, at_indices):
        assert run(look) == expected


class Sleeping(Augmented):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


@pytest.mark.slow
def test_waiting_while_looking_ahead_counts_as_waiting() -> None:
    loader: Any = DataLoader(
        Sleeping(400), batch_size=2, num_workers="auto", seeding="batch", prefetch_factor=2
    )
    loader._tuner = WorkerTuner(window_s=0.2)
    for _ in loader:
        loader.lookahead(2, len)
    assert loader.worker_choice.workers > 1, str(loader.worker_choice)


def test_the_count_of_an_iterable_datasets_batches_is_warned_of_when_they_are_given() -> None:
    class Short(Shards):
        def __len__(self) -> int:
            return 4

    loader = DataLoader(Short(3, 3), batch_size=None, num_workers=2, prefetch_factor=4)
    assert len(loader) == 4
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(loader.lookahead(8, lambda batch: batch)) == 6
        for _ in range(4):
            next(iterator)
    with pytest.warns(UserWarning, match="was reported to be 4"):
        next(iterator)
    next(iterator)
    assert next(iterator, None) is None


@pytest.mark.slow
def test_workers_that_are_spawned_are_looked_at_too() -> None:
    loader = make("shuffled, own generator", multiprocessing_context="spawn")
    told_and_delivered(loader, 4, lambda batch: batch)
