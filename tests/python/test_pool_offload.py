# SPDX-License-Identifier: Apache-2.0
"""The operations moved by ``penstock.offload`` run in a pool's workers, and training is bit-for-bit
the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Images
from pool_processes import PoolProcesses, pool_of
from torch import nn

import penstock
from penstock import DataLoader, Pool

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Classifier(nn.Module):
    """Features of an image, without parameters, and a layer with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 16 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = nn.functional.interpolate(images.float() / 255, scale_factor=0.5)
        features = features - features.mean((2, 3), keepdim=True)
        return self.head(features.flatten(1))


def losses_of(loader: DataLoader[Any], *, is_offloaded: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_offloaded:
        model = penstock.offload(model, loader, cut="maximal", verify_every=5)
    losses = []
    for _ in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.long
def test_offloaded_training_on_a_pool_is_bit_identical(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True}
    expected = losses_of(DataLoader(Images(256), seeding="batch", **options), is_offloaded=False)
    loader = DataLoader(
        Images(256), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, **options
    )
    assert losses_of(loader, is_offloaded=True) == expected
    assert loader.stats().boundary_batches > 16
