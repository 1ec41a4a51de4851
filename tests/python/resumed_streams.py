# SPDX-License-Identifier: Apache-2.0
"""Resumable datasets and samplers, and resumed streams."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from stream_oracle import describe
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

COUNT = 23


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.random())]


def jittered(samples: list[Any]) -> Any:
    return [default_collate(samples), draws()]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Counted(Dataset[Any]):
    """Samples that show their index; one may fail."""

    def __init__(self, count: int = COUNT, failing: int = -1) -> None:
        self.count = count
        self.failing = failing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.failing:
            raise LookupError(f"sample {index}")
        return index


class Augmented(Counted):
    def __getitem__(self, index: int) -> Any:
        return [super().__getitem__(index), draws()]


class Shards(IterableDataset[Any]):
    """Shards of different lengths whose samples are random."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        shift = draws()
        for index in range(first, 40 - 9 * first, step):
            yield [index, shift, draws()]


class Remembering(IterableDataset[Any]):
    """Keeps its position in the dataset object."""

    def __init__(self) -> None:
        self.place = 0
        self.was_loaded = False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if not self.was_loaded:
            self.place = 0 if info is None else info.id
        self.was_loaded = False
        while self.place < 31:
            self.place += 1 if info is None else info.num_workers
            yield self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.was_loaded = True


class Cursor(Iterator[int]):
    """An iterator with a state; it checks that it was not read before its state was loaded."""

    def __init__(self, place: int, step: int) -> None:
        self.place, self.step = place, step

    def __next__(self) -> int:
        if self.place >= 31:
            raise StopIteration
        self.place += self.step
        return self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.place < self.step, "it was read before it was put in its place"
        self.place = state["place"]


class WithCursor(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return Cursor(0, 1) if info is None else Cursor(info.id, info.num_workers)


class Faulty(Cursor):
    """Fails now and then, and continues."""

    def __next__(self) -> Any:
        if super().__next__() % 7 == 0:
            raise LookupError(f"at {self.place}")
        return Wrapped(self.place, draws())


class WithFaults(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        cursor = Faulty(0, 1) if info is None else Faulty(info.id, info.num_workers)
        return cursor if self.is_stateful else map(as_is, cursor)

    def __init__(self, is_stateful: bool) -> None:
        self.is_stateful = is_stateful


class Wrapped:
    """An object that has to be pickled."""

    def __init__(self, place: int, numbers: list[float]) -> None:
        self.place, self.numbers = place, numbers


def as_is(batch: Any) -> Any:
    return batch


class Counting(Dataset[Any]):
    """A map-style dataset that counts its requests."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return [index, self.asked]

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return COUNT


class StatefulSampler(Sampler[int]):
    """Keeps its position, like torchdata's StatefulDistributedSampler."""

    def __init__(self) -> None:
        self.yielded = 0
        self.next_yielded = 0
        self.pulls = 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.next_yielded = self.next_yielded, 0
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(4)).tolist()
        for index in order[self.yielded :]:
            self.yielded += 1
            self.pulls += 1
            yield index

    def __len__(self) -> int:
        return COUNT

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_yielded = state["yielded"]


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Return up to ``count`` batches and errors, as descriptions."""
    seen: list[Any] = []
    for _ in range(count):
        try:
            seen.append(describe(next(iterator)))
        except StopIteration:
            break
        except LookupError as error:
            seen.append(str(error).splitlines()[-1].removeprefix("LookupError: "))
    return seen


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def whole(make: Callable[[], Any]) -> list[Any]:
    """Return the stream of one epoch, uninterrupted."""
    seed_all(7)
    return take(iter(make()), 99)


def state_after(
    make: Callable[[], Any], count: int, *, asks_before: bool = False
) -> dict[str, Any]:
    """Return the state of a loader that delivered ``count`` batches, after a round trip through
    JSON.

    With ``asks_before``, another state is requested first.
    """
    seed_all(7)
    loader = make()
    if asks_before:
        loader.state_dict()
    iterator = iter(loader)
    take(iterator, count)
    return through_json(loader.state_dict())


def rest_of(make: Callable[[], Any], state: dict[str, Any], count: int = 99) -> list[Any]:
    """Return the stream of a fresh loader after ``state``, in a process with other generator
    states."""
    seed_all(1234)
    loader = make()
    loader.load_state_dict(state)
    before = describe([torch.get_rng_state(), random.getstate(), np.random.get_state()])
    iterator = iter(loader)
    after = describe([torch.get_rng_state(), random.getstate(), np.random.get_state()])
    assert after == before, "the trainer's own random numbers are its own"
    return take(iterator, count)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "single samples": lambda: {"batch_size": None, "sampler": RandomSampler(range(COUNT))},
    "own generator": lambda: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(5),
    },
    "Python sampler": lambda: {"batch_size": 4, "sampler": Backwards()},
    "SubsetRandomSampler": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(COUNT))},
    "WeightedRandomSampler": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0 + i for i in range(COUNT)], COUNT),
    },
    "own batch_sampler": lambda: {
        "batch_sampler": BatchSampler(
            RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(6)), 4, False
        )
    },
    "replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(COUNT), replacement=True, num_samples=40),
    },
    "stateful sampler": lambda: {"batch_size": 4, "sampler": StatefulSampler()},
}
