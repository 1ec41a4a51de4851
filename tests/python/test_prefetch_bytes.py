# SPDX-License-Identifier: Apache-2.0
"""prefetch_bytes: a bound on the prefetched data that takes the size of batches into account."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from sample_datasets import Computed
from stream_oracle import describe, error_of
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from penstock import DataLoader

KIB = 1024


def row(size: int, index: int) -> torch.Tensor:
    return torch.full((size,), float(index))


class Parts(IterableDataset[Any]):
    """Worker 0 has much less than the others."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(3 if info.id == 0 else 20):
            yield torch.full((64,), 100.0 * info.id + index)


def prefetched(loader: Any) -> int:
    """How many batches are requested or ready, once their number is stable."""
    before = None
    while True:
        stats = loader.stats()
        now = (stats.outstanding, stats.ready)
        if now == before and stats.ready > 0:
            return sum(now)
        before = now
        time.sleep(0.05)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bound", [1, 5 * KIB, 1 << 30])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": [5, 3, 3, 8, 11, 2, 0, 1]},
        {"in_order": True, "persistent_workers": True},
        {"batch_size": None},
    ],
    ids=["native indices", "own sampler", "persistent", "single samples"],
)
def test_prefetch_bytes_does_not_change_the_stream(bound: int, options: dict[str, Any]) -> None:
    def stream(**others: Any) -> list[Any]:
        torch.manual_seed(2)
        dataset = Computed(23, partial(row, 256))
        loader = DataLoader(dataset, **{"batch_size": 2, "num_workers": 2, **options, **others})
        return [[describe(batch) for batch in loader] for _ in range(2)]

    assert stream(prefetch_bytes=bound) == stream()


@pytest.mark.parametrize("bound", [1, KIB, 1 << 30])
def test_prefetch_bytes_loses_no_sample_at_shard_end(bound: int) -> None:
    expected = [describe(batch) for batch in DataLoader(Parts(), num_workers=3, prefetch_factor=3)]
    loader = DataLoader(Parts(), num_workers=3, prefetch_factor=3, prefetch_bytes=bound)
    assert [describe(batch) for batch in loader] == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dataset", [Computed(400, partial(row, 1024)), None])
def test_prefetched_batches_fit_the_bound(dataset: Any) -> None:
    dataset = dataset or TensorDataset(torch.zeros(400, 1024))
    loader = DataLoader(
        dataset, batch_size=4, num_workers=2, prefetch_factor=8, prefetch_bytes=5 * 16 * KIB
    )
    iterator = iter(loader)
    assert prefetched(loader) == 1, "nothing is known of the size of a batch yet"
    most = 0
    for _ in range(20):
        next(iterator)
        most = max(most, prefetched(loader))
    assert most == 5
    assert len(list(iterator)) == 80


def test_batch_larger_than_the_bound_is_prefetched_alone() -> None:
    loader = DataLoader(
        Computed(30, partial(row, 4096)), num_workers=3, prefetch_factor=4, prefetch_bytes=KIB
    )
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
        assert prefetched(loader) == 1


def test_prefetch_factor_still_bounds_the_batches() -> None:
    loader = DataLoader(
        Computed(60, partial(row, 8)), num_workers=2, prefetch_factor=2, prefetch_bytes=1 << 30
    )
    iterator = iter(loader)
    next(iterator)
    assert prefetched(loader) == 4


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"prefetch_bytes": 0, "num_workers": 1}, ValueError, "prefetch_bytes must be >= 1, got 0"),
        ({"prefetch_bytes": -5, "num_workers": 1}, ValueError, "must be >= 1, got -5"),
        (
            {"prefetch_bytes": 1e6, "num_workers": 1},
            TypeError,
            "an int >= 1 or None, got 1000000.0",
        ),
        ({"prefetch_bytes": True, "num_workers": 1}, TypeError, "an int >= 1 or None, got True"),
        ({"prefetch_bytes": 100}, ValueError, "requires workers, which prefetch"),
    ],
)
def test_invalid_prefetch_bytes_is_rejected(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    error = error_of(lambda: DataLoader([1], **options))
    assert type(error) is kind
    assert words in str(error)
