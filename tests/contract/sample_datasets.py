# SPDX-License-Identifier: Apache-2.0
"""Datasets whose batches record the events in a worker. All can be pickled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Computed(Dataset[Any]):
    """`length` samples, each the result of `function` for its index."""

    def __init__(self, length: int, function: Callable[[Any], Any]) -> None:
        self.length = length
        self.function = function

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


class Streamed(IterableDataset[Any]):
    """An iterable dataset over the items of `function`, which is called without arguments at each
    iter()."""

    def __init__(self, function: Callable[[], Any], length: int | None = None) -> None:
        self.function = function
        if length is not None:
            self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function())

    def __len__(self) -> int:
        if not hasattr(self, "length"):
            raise TypeError("this dataset has no length")
        return self.length

    def __repr__(self) -> str:
        return "Streamed()"


class Batched(Dataset[Any]):
    """Fetches a batch in one call, and marks each sample accordingly."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[str, int]:
        return ("one", index)

    def __getitems__(self, indices: list[int]) -> list[tuple[str, int]]:
        return [(f"one of {len(indices)}", index) for index in indices]


def number(index: Any) -> torch.Tensor:
    return torch.tensor([index, index + 0.5])


def typed_index(index: Any) -> tuple[str, str]:
    """The index that the dataset was asked for, with its type."""
    return (type(index).__name__, repr(index))


def worker_id() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


def worker_count() -> int:
    info = get_worker_info()
    return 0 if info is None else info.num_workers


def where(index: Any) -> tuple[Any, int, int, int]:
    """The index and the process that fetched it."""
    info = get_worker_info()
    return (index, worker_id(), worker_count(), -1 if info is None else info.seed)


def drawn(index: Any) -> tuple[Any, torch.Tensor, float, float]:
    """One draw of each global generator, as random transforms make them."""
    return (index, torch.rand(2), random.random(), float(np.random.rand()))


def own_share(length: int) -> Iterator[int]:
    """The usual way to split an iterable dataset: worker k reads every n-th number from k."""
    return iter(range(max(worker_id(), 0), length, max(worker_count(), 1)))


def as_is(batch: Any) -> Any:
    return batch
