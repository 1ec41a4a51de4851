# SPDX-License-Identifier: Apache-2.0
"""Trains with the pool of PENSTOCK_POOL until it is ended, for tests that watch a pool. Part of its
model runs in the workers."""

from __future__ import annotations

import os
import time

import torch
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader

STEP_S = 0.02
SAMPLE_S = 0.006  # eight samples take longer than two steps, so three workers are of use


class Photographs(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((3, 32, 32), index % 256, dtype=torch.uint8)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.convolution(torch.nn.functional.avg_pool2d(images / 255, 2))
        return values


def main() -> None:
    torch.set_num_threads(1)
    pool = os.environ["PENSTOCK_POOL"]
    loader = DataLoader(Photographs(), batch_size=8, prefetch_factor=4, pool=pool)
    model = penstock.offload(Network(), loader, cut="maximal")
    for images in loader:
        model(images).sum().backward()
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
