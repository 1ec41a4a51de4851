# SPDX-License-Identifier: Apache-2.0
"""Large ready batches: 64 samples of 3x224x224 float32, in memory already; 38.5 MB a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from workloads.workload import Workload, index_batches

SAMPLE_COUNT = 256  # 154 MB: more than any cache, so samples are read from memory
EPOCH_SAMPLES = 16_384


class ReadySamples(Dataset[torch.Tensor]):
    """An epoch of `EPOCH_SAMPLES` that cycles through the samples in memory."""

    def __init__(self, samples: torch.Tensor) -> None:
        self._samples = samples.unbind()

    def __len__(self) -> int:
        return EPOCH_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._samples[index % len(self._samples)]


def build(folder: Path) -> dict[str, Any]:
    samples = torch.randn(SAMPLE_COUNT, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return {"dataset": ReadySamples(samples), "batch_size": 64, "shuffle": True}


def work(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    dataset = arguments["dataset"]
    batch = torch.empty(arguments["batch_size"], *dataset[0].shape)
    for samples in index_batches(arguments, index, count):
        torch.stack([dataset[sample] for sample in samples], out=batch)
        yield


WORKLOAD = Workload(
    "large",
    build,
    work,
    work_is="torch.stack(out=) into one batch that stays, 2 processes",
    floor=8.0,
    ceiling_of_cpu=1 / 8,
)
