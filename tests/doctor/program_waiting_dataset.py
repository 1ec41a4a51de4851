# SPDX-License-Identifier: Apache-2.0
"""The dataset waits 4 ms for each sample, as for an object store."""

import time

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    samples = Samples(lambda index: time.sleep(0.004))
    loader = DataLoader(samples, batch_size=16, num_workers=2, persistent_workers=True)
    train(loader, lambda batch: compute(0.001))
