# SPDX-License-Identifier: Apache-2.0
"""Pool workers that do not keep to the protocol: an epoch ends whole, or with an error that names
the worker.

`tests/cpp/loader/hostile_worker_test.cpp` has a case for each field of what a worker sends.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Augmented, digests
from pool_processes import PoolProcesses, pool_of

from penstock import DataLoader
from penstock.errors import PenstockError, PoolWarning

pytestmark = pytest.mark.slow

COUNT = 40


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def pooled(pool: PoolProcesses, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        Augmented(COUNT),
        pool=pool.endpoint,
        code_paths=[CODE],
        timeout=60,
        generator=generator,
        **options,
    )


def take_all(loader: DataLoader[Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)
        return list(loader)


def test_epoch_that_its_only_worker_ends_early_is_an_error_that_names_the_worker(
    pool: PoolProcesses,
) -> None:
    """`len(loader)` was 40, the loop ended after 7 batches, and the program with exit code 0."""
    pool.start_altered_worker("end_shards_from", "7")
    loader = pooled(pool)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    with pytest.raises(PenstockError, match=r"(?s)in penstock worker .* at tcp://.*batch 7 of"):
        next(batches)
    assert not loader.state_dict()["_iterator_finished"]


def test_epoch_is_whole_beside_a_worker_that_ends_it_early(pool: PoolProcesses) -> None:
    """40 batches were 19, and `state_dict()` said that the epoch was finished."""
    pool.start_worker(processes=2)
    alone = digests(take_all(pooled(pool)))
    pool.start_altered_worker("end_shards_from", "11")
    with pytest.warns(PoolWarning, match="is connected to anew, since it said that a shard has"):
        for _ in range(10):  # the altered worker may join too late to be asked in one epoch
            loader = pooled(pool)
            batches = iter(loader)
            seen = []
            for _ in range(COUNT):
                assert not loader.state_dict()["_iterator_finished"]
                seen.append(next(batches))
            with pytest.raises(StopIteration):
                next(batches)
            assert digests(seen) == alone
            assert loader.state_dict()["_iterator_finished"]
            del batches, loader
