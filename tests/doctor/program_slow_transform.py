# SPDX-License-Identifier: Apache-2.0
"""The dataset's transform computes for 3 ms per sample."""

from typing import Any

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader


def augment(sample: Any) -> Any:
    compute(0.003)
    return sample * 2


if __name__ == "__main__":
    samples = Samples(lambda index: compute(0.0002), transform=augment)
    loader = DataLoader(samples, batch_size=16, num_workers=2, persistent_workers=True)
    train(loader, lambda batch: compute(0.001))
