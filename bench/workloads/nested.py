# SPDX-License-Identifier: Apache-2.0
"""Nested dicts of numbers: 39 to a sample, 512 samples a batch, torch's default collate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, default_collate

from workloads.workload import Workload, fetch_and_collate

Sample = dict[str, Any]


class Clicks(Dataset[Sample]):
    """Samples that are in memory as plain Python objects."""

    def __init__(self, sample_count: int) -> None:
        draw = random.Random(0)
        self._samples = [
            {
                "label": draw.randint(0, 1),
                "dense": {f"d{column}": draw.random() for column in range(13)},
                "sparse": {f"s{column}": draw.randrange(100_000) for column in range(25)},
            }
            for _ in range(sample_count)
        ]

    def __len__(self) -> int:
        return 8 * len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index % len(self._samples)]


def build(folder: Path) -> dict[str, Any]:
    return {"dataset": Clicks(8192), "batch_size": 512, "shuffle": True}


def work(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    return fetch_and_collate({**arguments, "collate_fn": default_collate}, index, count)


WORKLOAD = Workload(
    "nested",
    build,
    work,
    work_is="the samples of each batch and torch's default_collate, 2 processes",
)
