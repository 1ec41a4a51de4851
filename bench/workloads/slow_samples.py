# SPDX-License-Identifier: Apache-2.0
"""Samples of which one in twenty takes 50 ms, as from a store with a heavy tail, on threads that go
on with the next batches meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from workloads.workload import Workload, index_batches

SLOW_S = 0.05


class SlowSamples(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 20 == 0:
            time.sleep(SLOW_S)
        return torch.full((1000,), float(index))


def build(folder: Path) -> dict[str, Any]:
    return {"dataset": SlowSamples(64_000), "batch_size": 32, "shuffle": True}


def work(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    """One sample after the other."""
    for samples in index_batches(arguments, index, count):
        [arguments["dataset"][sample] for sample in samples]
        yield


WORKLOAD = Workload(
    "slow_samples",
    build,
    work,
    work_is="the samples of each batch, one after the other, 2 processes",
    floor=6.0,
    penstock_options={"fetch_threads": 16, "prefetch_factor": 8},
)
