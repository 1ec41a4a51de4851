# SPDX-License-Identifier: Apache-2.0
"""The program keeps its last 48 batches of 4 MB, more than the workers have shared memory for."""

from collections import deque
from typing import Any

import torch
from planted_work import train
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset[Any]):
    def __init__(self) -> None:
        self.samples = torch.rand(64, 256 << 8)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


if __name__ == "__main__":
    kept: deque[Any] = deque(maxlen=48)
    loader = DataLoader(Noise(), batch_size=16, num_workers=1, persistent_workers=True)
    train(loader, kept.append)
