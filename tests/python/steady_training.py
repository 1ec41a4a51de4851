# SPDX-License-Identifier: Apache-2.0
"""Trains with the pool of PENSTOCK_POOL until it is ended, for tests that watch a pool."""

from __future__ import annotations

import os
import time

import torch
from torch.utils.data import Dataset

from penstock import DataLoader

STEP_S = 0.02
SAMPLE_S = 0.006  # eight of them take longer than two steps, so three workers are of use


class Photographs(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((3, 32, 32), float(index))


def main() -> None:
    pool = os.environ["PENSTOCK_POOL"]
    for _ in DataLoader(Photographs(), batch_size=8, prefetch_factor=4, pool=pool):
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
