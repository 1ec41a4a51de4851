# SPDX-License-Identifier: Apache-2.0
"""Loaders of all kinds, by name, for lookahead tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from penstock import DataLoader


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
    """Shards, of which some end long before the others."""

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
    """Draws from the global generator at each pull, and reuses the same list."""

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


def make(name: str, **others: Any) -> DataLoader[Any]:
    options = {"batch_size": 2, "num_workers": 2, **LOADERS[name](), **others}
    if "batch_sampler" in options:
        del options["batch_size"]
    return DataLoader(**options)
