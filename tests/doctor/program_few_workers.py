# SPDX-License-Identifier: Apache-2.0
"""One worker computes for 2 ms per sample, while the other CPU is idle."""

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    samples = Samples(lambda index: compute(0.002))
    loader = DataLoader(samples, batch_size=16, num_workers=1, persistent_workers=True)
    train(loader, lambda batch: compute(0.001))
