# SPDX-License-Identifier: Apache-2.0
"""Samplers of every kind: called at the same moments, with their indices passed on unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sample_datasets import Computed, as_is, drawn, number, typed_index
from stream_oracle import Recorder, Scenario, assert_same_stream, whole_epochs
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

ASKED = partial(Computed, 9, typed_index)
DRAWS = partial(Computed, 10, drawn)
NUMBERS = partial(Computed, 10, number)


class Yielding(Sampler[Any]):
    """A sampler over the result of `function`, with an arbitrary length."""

    def __init__(self, function: Callable[[], Any], length: int = 0) -> None:
        self.function = function
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function())

    def __len__(self) -> int:
        return self.length


class DrawsAtOnce(Yielding):
    """Draws from the global generators in iter(), as hand-written samplers do."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(8).tolist()
        random.shuffle(order)
        return iter(order)


class Label:
    """An index that is a plain object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Label({self.name})"


def draws_at_each() -> Iterator[int]:
    for _ in range(8):
        yield int(torch.randint(9, ()).item()) + random.randrange(1) + int(np.random.randint(1))


def fails_after(count: int) -> Iterator[int]:
    yield from range(count)
    raise LookupError("the sampler has lost its place")


def uneven_batches() -> list[list[int]]:
    return [[0], [1, 2, 3], [4, 5], [], [6, 7, 8, 8]]


def names_and_objects() -> list[Any]:
    return [1, True, "x", 2.5, (1, 2), None, b"raw", Label("a"), np.int64(3), torch.tensor(4)]


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def torch_sampler(name: str, dataset: Any) -> Any:
    weights = [0.1, 0.4, 0.0, 0.5, 1.0]
    makers: dict[str, Callable[[], Any]] = {
        "sequential": lambda: SequentialSampler(dataset),
        "random": lambda: RandomSampler(dataset),
        "random, own generator": lambda: RandomSampler(dataset, generator=seeded()),
        "random, more than there are": lambda: RandomSampler(dataset, num_samples=23),
        "random, fewer than there are": lambda: RandomSampler(dataset, num_samples=4),
        "random, replaced": lambda: RandomSampler(dataset, replacement=True),
        "random, replaced, 70 of them": lambda: RandomSampler(
            dataset, replacement=True, num_samples=70
        ),
        "random, replaced, own generator": lambda: RandomSampler(
            dataset, replacement=True, num_samples=40, generator=seeded()
        ),
        "subset": lambda: SubsetRandomSampler([7, 1, 3]),
        "weighted": lambda: WeightedRandomSampler(weights, 11),
        "weighted, not replaced": lambda: WeightedRandomSampler(weights, 3, replacement=False),
        "distributed": lambda: DistributedSampler(dataset, num_replicas=2, rank=1, seed=3),
        "distributed, not shuffled": lambda: DistributedSampler(
            dataset, num_replicas=3, rank=2, shuffle=False, drop_last=True
        ),
    }
    return makers[name]()


TORCH_SAMPLERS = [
    Scenario(
        f"torch's sampler: {name}, {workers} workers",
        DRAWS,
        lambda dataset, name=name, workers=workers: {
            "sampler": torch_sampler(name, dataset),
            "batch_size": 3,
            "num_workers": workers,
        },
        whole_epochs(2 if workers else 3),
    )
    for workers in (0, 1)
    for name in (
        "sequential",
        "random",
        "random, own generator",
        "random, more than there are",
        "random, fewer than there are",
        "random, replaced",
        "random, replaced, 70 of them",
        "random, replaced, own generator",
        "subset",
        "weighted",
        "weighted, not replaced",
        "distributed",
        "distributed, not shuffled",
    )
]

OWN_SAMPLERS = [
    Scenario(
        f"own sampler: {name}, {workers} workers",
        ASKED,
        lambda dataset, sampler=sampler, workers=workers: {
            "sampler": sampler(),
            "batch_size": 4,
            "num_workers": workers,
            "collate_fn": as_is,
        },
    )
    for workers in (0, 1)
    for name, sampler in (  # made again for each run: a loader may share an index's memory
        ("a list of ints", lambda: [3, 1, 2, 8, 5]),
        ("a tuple", lambda: (3, 1)),
        ("a range", lambda: range(7)),
        ("negative and repeated ints", lambda: [-1, -1, 0, -9]),
        ("ints beyond 64 bits", lambda: [2**63, -(2**70), 2**63 - 1]),
        ("strings", lambda: ["cat", "dog", "ox"]),
        ("a string", lambda: "letters"),
        ("a dict's keys", lambda: {"a": 1, "b": 2}),
        ("tensors", lambda: list(torch.arange(5))),
        ("a tensor of two dimensions", lambda: torch.arange(6).view(3, 2)),
        ("numpy integers", lambda: np.arange(5, dtype=np.int32)),
        ("objects of all kinds", names_and_objects),
        ("a sampler object with a wrong length", lambda: Yielding(partial(range, 5), 2)),
        ("a sampler that draws in iter()", lambda: DrawsAtOnce(list)),
        ("a sampler that draws at each index", lambda: Yielding(draws_at_each)),
        ("a sampler that raises", lambda: Yielding(partial(fails_after, 6))),
        ("an empty sampler", list),
    )
]

BATCH_SAMPLERS = [
    Scenario(
        f"batch sampler: {name}, {workers} workers",
        ASKED,
        lambda dataset, sampler=sampler, workers=workers: {
            "batch_sampler": sampler(),
            "num_workers": workers,
            "collate_fn": as_is,
        },
    )
    for workers in (0, 1)
    for name, sampler in (
        ("uneven lists", uneven_batches),
        ("tuples", lambda: [(1, 2), (3,)]),
        ("tensors", lambda: [torch.tensor([1, 2]), torch.tensor([3])]),
        ("arrays", lambda: [np.array([1, 2]), np.array([3])]),
        ("strings", lambda: ["ab", "c"]),
        ("batches of objects", lambda: [names_and_objects(), [Label("b")]]),
        ("iterators", lambda: [iter([1, 2]), iter([3])]),
        ("one that is not iterable", lambda: [3, 4]),
        ("an object", lambda: Yielding(uneven_batches, 5)),
        ("one that raises", lambda: Yielding(lambda: ([index] for index in fails_after(3)))),
        ("torch's over a list", lambda: BatchSampler([5, 4, 3, 2, 1], 2, drop_last=True)),
        ("torch's over a sampler that draws", lambda: BatchSampler(DrawsAtOnce(list), 3, False)),
        (
            "torch's inside torch's",
            lambda: BatchSampler(BatchSampler(range(6), 2, False), 2, False),
        ),
    )
] + [
    Scenario(
        "torch's batch sampler over its random sampler",
        DRAWS,
        lambda dataset: {
            "batch_sampler": BatchSampler(RandomSampler(dataset), 4, drop_last=True),
            "num_workers": 2,
        },
        whole_epochs(2),
    ),
    Scenario(
        "a sampler without batches",
        ASKED,
        lambda dataset: {"sampler": names_and_objects(), "batch_size": None, "num_workers": 1},
    ),
    Scenario(
        "an empty batch with default_collate",
        NUMBERS,
        {"batch_sampler": uneven_batches(), "num_workers": 1},
    ),
]


@pytest.mark.sampled(30)
@pytest.mark.parametrize(
    "scenario", TORCH_SAMPLERS + OWN_SAMPLERS + BATCH_SAMPLERS, ids=lambda scenario: scenario.name
)
def test_sampled_stream_matches_torch(loader_class: type, scenario: Scenario) -> None:
    assert_same_stream(loader_class, scenario)


class Watched(Sampler[int]):
    """Records each index that is pulled from it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pulled: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.pulled.append(index)
            yield index

    def __len__(self) -> int:
        return self.length


def pulls(loader: Any, recorder: Recorder) -> None:
    iterator = iter(loader)
    recorder.note("pulled before the first batch", tuple(loader.sampler.pulled))
    while recorder.draw(iterator):
        recorder.note("pulled", tuple(loader.sampler.pulled))


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, 1), (2, 1), (2, 3), (3, 2)])
def test_sampler_is_pulled_as_far_ahead_as_by_torch(
    loader_class: type, workers: int, prefetch: int | None, batch_size: int | None
) -> None:
    assert_same_stream(
        loader_class,
        Scenario(
            "pulls",
            partial(Computed, 20, float),
            lambda dataset: {
                "sampler": Watched(20),
                "batch_size": batch_size,
                "num_workers": workers,
                "prefetch_factor": prefetch,
            },
            pulls,
        ),
    )


def test_indices_of_a_random_split_reach_the_dataset_as_ints(loader_class: type) -> None:
    from torch.utils.data import random_split

    part = random_split(Computed(10, typed_index), [4, 6])[0]  # type: ignore[arg-type]
    for batch in loader_class(part, batch_size=2, shuffle=True, collate_fn=as_is, num_workers=1):
        assert {kind for kind, _ in batch} == {"int"}


def test_distributed_set_epoch_takes_effect_at_the_next_iter(
    loader_class: type,
) -> None:
    def drive(loader: Any, recorder: Recorder) -> None:
        for epoch in (0, 3, 3):
            loader.sampler.set_epoch(epoch)
            recorder.draw_all(iter(loader))

    assert_same_stream(
        loader_class,
        Scenario(
            "set_epoch",
            NUMBERS,
            lambda dataset: {
                "sampler": DistributedSampler(dataset, num_replicas=2, rank=0),
                "batch_size": 2,
                "num_workers": 2,
                "persistent_workers": True,
            },
            drive,
        ),
    )
