# SPDX-License-Identifier: Apache-2.0
"""A pool's workers make batches of 4 MB quickly, and the link to them is slow. The environment
names the pool."""

import os
from typing import Any

import torch
from planted_work import compute, train
from torch.utils.data import Dataset

from penstock import DataLoader


class Noise(Dataset[Any]):
    def __init__(self) -> None:
        self.samples = torch.rand(64, 256 << 8)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


if __name__ == "__main__":
    loader = DataLoader(Noise(), batch_size=16, pool=os.environ["PLANTED_POOL"])
    train(loader, lambda batch: compute(0.001))
