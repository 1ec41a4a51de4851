# SPDX-License-Identifier: Apache-2.0
"""A small training on pictures whose leaves are large enough for lazy fetching from a pool's
workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pool_datasets import CODE, Pictures
from pool_processes import PoolProcesses
from torch import nn

import penstock
from penstock import DataLoader, Pool
from penstock.tracking.lazy_tensor import LazyTensor

Step = Callable[[Any, dict[str, Any]], torch.Tensor]
IMAGE_BYTES = 8 * 3 * 64 * 64  # of a batch
MASK_BYTES = 8 * 8 * 64 * 64


class Shrinking(nn.Module):
    """Reads the pictures through a small part without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        small = nn.functional.adaptive_avg_pool2d(images.float() / 255, 8)
        features = small - small.mean((2, 3), keepdim=True)
        out: torch.Tensor = self.head(features.flatten(1))
        return out


def plain_step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["class"])


def losses_of(
    loader: DataLoader[Any],
    step: Step,
    *,
    is_offloaded: bool,
    make_model: Callable[[], Any] = Shrinking,
    epochs: int = 2,
    **options: Any,
) -> list[float]:
    torch.manual_seed(0)
    model: Any = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_offloaded:
        model = penstock.offload(model, loader, **{"cut": "maximal", **options})
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = step(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


def loader_of(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=8,
        pool=Pool(pool.endpoint, code_paths=[CODE]),
        timeout=60,
        **{"shuffle": True, **options},
    )


def expected(
    count: int,
    step: Step,
    make_model: Callable[[], Any] = Shrinking,
    make_dataset: Callable[[int], Any] = Pictures,
) -> list[float]:
    """Return the losses of the program without a pool and without `offload`."""
    loader = DataLoader(make_dataset(count), batch_size=8, shuffle=True, seeding="batch")
    return losses_of(loader, step, is_offloaded=False, make_model=make_model)


def is_withheld(leaf: Any) -> bool:
    """Return whether the leaf stayed with its worker, and has not been read."""
    return isinstance(leaf, LazyTensor) and leaf._value is not None and leaf._value.is_withheld


def first_withheld(loader: DataLoader[Any], model: Any) -> tuple[Any, dict[str, Any]]:
    """Return an iterator, and its first batch whose image stayed with its worker."""
    iterator = iter(loader)
    for batch in iterator:
        if is_withheld(batch["image"]):
            return iterator, batch
        plain_step(model, batch).backward()  # type: ignore[no-untyped-call]
    raise AssertionError("no batch came without its image")
