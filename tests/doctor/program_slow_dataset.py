# SPDX-License-Identifier: Apache-2.0
"""The dataset computes for 3 ms per sample, and its workers use all the CPUs."""

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    samples = Samples(lambda index: compute(0.003))
    loader = DataLoader(samples, batch_size=16, num_workers=2, persistent_workers=True)
    train(loader, lambda batch: compute(0.001))
