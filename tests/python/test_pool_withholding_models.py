# SPDX-License-Identifier: Apache-2.0
"""Leaves stay with a pool's workers for models of several loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import Pictures
from pool_processes import PoolProcesses, pool_of
from pool_training import (
    IMAGE_BYTES,
    MASK_BYTES,
    Shrinking,
    loader_of,
    plain_step,
)

import penstock
from penstock import DataLoader

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


# ---- Several loaders


def validated(train: Any, val: Any, *, is_offloaded: bool, is_mixed: bool = False) -> list[float]:
    """Losses of a training with validation after each epoch, or in the middle of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Shrinking()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_offloaded:
        model = penstock.offload(model, train, val, cut="maximal")
    found = []

    def learn(batch: dict[str, Any]) -> None:
        loss = plain_step(model.train(), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())

    def validate(batch: dict[str, Any]) -> None:
        with torch.no_grad():
            found.append(plain_step(model.eval(), batch).item())

    for _ in range(2):
        if is_mixed:
            for batch, other in zip(train, val, strict=True):
                learn(batch)
                validate(other)
        else:
            for batch in train:
                learn(batch)
            for batch in val:
                validate(batch)
    return found


@pytest.mark.parametrize("is_mixed", [False, True], ids=["after each epoch", "in each step"])
def test_leaves_of_training_and_validation_stay_with_the_workers(
    pool: PoolProcesses, is_mixed: bool
) -> None:
    def seeded() -> dict[str, Any]:
        # A pool's loader draws when iter() is called, and one without workers at the first batch.
        return {"seeding": "batch", "generator": torch.Generator().manual_seed(5)}

    wanted = validated(
        DataLoader(Pictures(160), batch_size=8, shuffle=True, **seeded()),
        DataLoader(Pictures(160, edge=48), batch_size=8, **seeded()),
        is_offloaded=False,
        is_mixed=is_mixed,
    )
    pool.start_worker(processes=2)  # each serves one loader at a time
    train = loader_of(pool, Pictures(160), **seeded())
    val = loader_of(pool, Pictures(160, edge=48), shuffle=False, **seeded())
    assert validated(train, val, is_offloaded=True, is_mixed=is_mixed) == wanted
    for loader, share in ((train, 1), (val, (48 / 64) ** 2)):
        stats = loader.stats()
        assert stats.recalled_batches <= 1  # the first of the other worker, which is compared
        assert stats.withheld_bytes > 15 * share * (IMAGE_BYTES + MASK_BYTES)
