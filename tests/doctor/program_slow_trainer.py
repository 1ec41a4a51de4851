# SPDX-License-Identifier: Apache-2.0
"""The program computes for 25 ms per step, and its loader is idle."""

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    samples = Samples(lambda index: None)
    loader = DataLoader(samples, batch_size=16, num_workers=1, persistent_workers=True)
    train(loader, lambda batch: compute(0.025))
