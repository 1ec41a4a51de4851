# SPDX-License-Identifier: Apache-2.0
"""Map-style datasets: the same seeds give torch's batches, order and generator states."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sample_datasets import Batched, Computed, as_is, drawn, number, where
from stream_oracle import Scenario, assert_same_stream, whole_epochs
from torch.utils.data import ConcatDataset, StackDataset, Subset, random_split

NUMBERS = partial(Computed, 10, number)
PLACES = partial(Computed, 10, where)
DRAWS = partial(Computed, 10, drawn)


class FalsyBatched(Computed):
    __getitems__ = None


class LazyBatched(Batched):
    def __getitems__(self, indices: list[int]) -> Any:
        return ((type(indices).__name__, index) for index in indices)


class ShortBatched(Batched):
    """Gives one sample less than it was asked for; the loader accepts the rest."""

    def __getitems__(self, indices: list[int]) -> list[tuple[str, int]]:
        return super().__getitems__(indices[1:])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split_in_two(length: int) -> Any:
    return random_split(Computed(length, where), [3, length - 3])[1]  # type: ignore[arg-type]


def tag_dataset(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None and info.id == worker
    info.dataset.function = partial(tagged, worker)  # type: ignore[attr-defined]


def tagged(worker: int, index: int) -> tuple[str, int]:
    return (f"set up by {worker}", index)


def reseed(worker: int) -> None:
    torch.manual_seed(100 + worker)
    random.seed(200 + worker)
    np.random.seed(300 + worker)


def draw_in_collate(samples: list[Any]) -> tuple[Any, torch.Tensor]:
    return (samples, torch.rand(len(samples)))


MATRIX = [
    Scenario(
        f"workers {workers}, batches of {batch_size}, drop_last {drop_last}",
        NUMBERS,
        {"num_workers": workers, "batch_size": batch_size, "drop_last": drop_last},
    )
    for workers in (0, 1, 2, 3)
    for batch_size, drop_last in ((1, False), (3, False), (3, True), (99, False), (99, True))
    if workers in (0, 2) or batch_size == 3
]

PREFETCH = [
    Scenario(
        f"prefetch {prefetch} with {workers} workers",
        PLACES,
        {"num_workers": workers, "prefetch_factor": prefetch, "batch_size": 2, "collate_fn": as_is},
    )
    for workers, prefetch in ((1, 1), (1, 5), (2, 1), (2, 2), (3, 1), (3, 5))
]

SHUFFLES = [
    Scenario(
        f"{epochs} shuffled, {generator} generator, {workers} workers, persistent {persistent}",
        DRAWS,
        (
            lambda dataset, workers=workers, generator=generator, persistent=persistent: {
                "shuffle": True,
                "batch_size": 3,
                "num_workers": workers,
                "persistent_workers": persistent,
                "generator": seeded(5) if generator == "own" else None,
            }
        ),
        whole_epochs(epochs),
    )
    for generator in ("global", "own")
    for workers, persistent in ((0, False), (2, False), (2, True))
    for epochs in (1, 3)
    if epochs == 3 or not persistent
]

SOURCES = [
    Scenario("__getitems__ is given the batch's indices", lambda: Batched(7), {"batch_size": 3}),
    Scenario("__getitems__ in workers", lambda: Batched(7), {"batch_size": 3, "num_workers": 2}),
    Scenario(
        "__getitems__ is not used without batches",
        lambda: Batched(3),
        {"batch_size": None, "num_workers": 1},
    ),
    Scenario("__getitems__ that is None", lambda: FalsyBatched(7, number), {"batch_size": 3}),
    Scenario(
        "__getitems__ that is None, in workers",
        lambda: FalsyBatched(7, number),
        {"batch_size": 3, "num_workers": 2},
    ),
    Scenario(
        "__getitems__ that is a generator",
        lambda: LazyBatched(7),
        {"batch_size": 3, "collate_fn": list, "num_workers": 1},
    ),
    Scenario(
        "__getitems__ that gives too few",
        lambda: ShortBatched(7),
        {"batch_size": 3, "num_workers": 1},
    ),
    Scenario(
        "a subset of a dataset with __getitems__",
        lambda: Subset(Batched(9), [8, 1, 1, 5, 0]),
        {"batch_size": 2, "num_workers": 2},
    ),
    Scenario(
        "a subset of a subset",
        lambda: Subset(Subset(Computed(9, number), [8, 1, 5, 0]), [3, 2, 0]),
        {"batch_size": 2, "num_workers": 1},
    ),
    Scenario("a random split", partial(split_in_two, 10), {"batch_size": 3, "num_workers": 2}),
    Scenario(
        "concatenated datasets",
        lambda: ConcatDataset([Computed(4, number), Computed(3, number)]),
        {"batch_size": 3, "shuffle": True, "num_workers": 2},
    ),
    Scenario(
        "stacked datasets",
        lambda: StackDataset(image=Computed(5, number), label=Computed(5, float)),
        {"batch_size": 2, "num_workers": 1},
    ),
    Scenario("a list as a dataset", lambda: [5, 6, 7, 8], {"batch_size": 3, "num_workers": 1}),
    Scenario("a tensor as a dataset", lambda: torch.arange(8).view(4, 2), {"batch_size": 3}),
    Scenario(
        "a tensor as a dataset, in workers",
        lambda: torch.arange(8).view(4, 2),
        {"batch_size": 3, "num_workers": 2},
    ),
    Scenario("a string as a dataset", lambda: "photographs", {"batch_size": 4, "num_workers": 1}),
    Scenario("an array as a dataset", lambda: np.arange(6.0).reshape(3, 2), {"batch_size": 2}),
    Scenario("an empty dataset", list, {"batch_size": 4}),
    Scenario("an empty dataset with workers", list, {"batch_size": 4, "num_workers": 2}),
    Scenario("fewer batches than workers", lambda: [1, 2], {"batch_size": 2, "num_workers": 3}),
]

UNBATCHED = [
    Scenario(
        f"batch_size None, {workers} workers, shuffle {shuffle}",
        DRAWS,
        {"batch_size": None, "num_workers": workers, "shuffle": shuffle},
    )
    for workers in (0, 2)
    for shuffle in (False, True)
]

WORKER_STATE = [
    Scenario(
        f"random draws in {place}, {workers} workers",
        DRAWS,
        {"batch_size": 2, "num_workers": workers, **options},
        whole_epochs(2),
    )
    for workers in (0, 1, 2, 3)
    for place, options in (
        ("the dataset", {}),
        ("collate_fn", {"collate_fn": draw_in_collate}),
    )
] + [
    Scenario(
        "worker_init_fn changes the worker's dataset",
        PLACES,
        {"batch_size": 2, "num_workers": 2, "worker_init_fn": tag_dataset},
    ),
    Scenario(
        "worker_init_fn seeds the generators",
        DRAWS,
        {"batch_size": 2, "num_workers": 2, "worker_init_fn": reseed},
    ),
    Scenario(
        "worker_init_fn is a closure under fork",
        PLACES,
        {"num_workers": 1, "worker_init_fn": lambda worker: tag_dataset(worker)},
    ),
    Scenario(
        "worker info names the worker, their count and the seed",
        PLACES,
        {"batch_size": None, "num_workers": 3},
        whole_epochs(2),
    ),
    Scenario(
        "worker info of persistent workers keeps its seed",
        PLACES,
        {"batch_size": None, "num_workers": 2, "persistent_workers": True},
        whole_epochs(3),
    ),
]

SCENARIOS = MATRIX + PREFETCH + SHUFFLES + SOURCES + UNBATCHED + WORKER_STATE


@pytest.mark.sampled(30)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_map_style_stream_matches_torch(loader_class: type, scenario: Scenario) -> None:
    assert_same_stream(loader_class, scenario)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [10**10, 2**62, sys.maxsize])
def test_sequential_order_is_not_materialised(
    loader_class: Any, length: int, num_workers: int
) -> None:
    iterator = iter(loader_class(Computed(length, as_is), batch_size=3, num_workers=num_workers))
    assert [next(iterator).tolist() for _ in range(6)] == [
        [first, first + 1, first + 2] for first in range(0, 18, 3)
    ]
