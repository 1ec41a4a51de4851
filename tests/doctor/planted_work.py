# SPDX-License-Identifier: Apache-2.0
"""Work of a known size, for programs whose bottleneck is planted."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

# The programs give lambdas to workers, which Python 3.14's fork server does not accept.
multiprocessing.set_start_method("fork", force=True)


def compute(seconds: float) -> None:
    """Is on a CPU for so long, under any other load of the machine."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(200))


class Samples(Dataset[Any]):
    """Small tensors; ``work`` is called with the index of each, and ``transform`` with the
    tensor."""

    def __init__(
        self,
        work: Callable[[int], None],
        count: int = 4096,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.work = work
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.work(index)
        sample = torch.full((64,), float(index))
        return sample if self.transform is None else self.transform(sample)


def train(loader: DataLoader[Any], step: Callable[[Any], None], epochs: int = 1000) -> None:
    for _ in range(epochs):
        for batch in loader:
            step(batch)
