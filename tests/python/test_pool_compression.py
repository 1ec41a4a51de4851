# SPDX-License-Identifier: Apache-2.0
"""Over a slow connection a pool's batches are compressed, and are bit-for-bit identical."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Tokens
from pool_processes import PoolProcesses, pool_of
from tcp_proxy import TcpProxy, open_proxy

from penstock import DataLoader, Pool

pytestmark = pytest.mark.slow

SLOW = 20e6  # bytes a second


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture
def to_pieces(pool: PoolProcesses) -> Iterator[TcpProxy]:
    """The route to the data port of the pool's only worker."""
    with open_proxy() as proxy:
        worker = pool.start_worker("--data-advertise", proxy.endpoint)
        proxy.lead_to(worker.data_endpoint())
        yield proxy


def batches_of(loader: DataLoader[Any], epochs: int = 2) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    return [
        {key: value.clone() for key, value in batch.items()}
        for _ in range(epochs)
        for batch in loader
    ]


def expect_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            assert one[key].stride() == other[key].stride()
            assert one[key].numpy().tobytes() == other[key].numpy().tobytes(), key


@pytest.mark.long
def test_slow_connection_compresses_batches(pool: PoolProcesses, to_pieces: TcpProxy) -> None:
    to_pieces.limit(SLOW)
    options: dict[str, Any] = {"batch_size": 32, "shuffle": True}
    expected = batches_of(DataLoader(Tokens(1600), seeding="batch", **options))
    loader = DataLoader(
        Tokens(1600), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, **options
    )
    expect_same(batches_of(loader), expected)
    plain_bytes = sum(value.nbytes for batch in expected for value in batch.values())
    # ids to an eighth, bools too, weights to a quarter at most, 32 rows of users to 4; the first
    # batches are sent uncompressed.
    assert loader.stats().batch_bytes < 0.5 * plain_bytes


@pytest.mark.long
def test_kept_compressed_batches_stay_unchanged(pool: PoolProcesses, to_pieces: TcpProxy) -> None:
    to_pieces.limit(SLOW)
    options: dict[str, Any] = {"batch_size": 32}
    torch.manual_seed(5)
    expected = list(DataLoader(Tokens(1600), seeding="batch", **options))
    torch.manual_seed(5)
    loader = DataLoader(
        Tokens(1600), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, **options
    )
    expect_same(list(loader), expected)
