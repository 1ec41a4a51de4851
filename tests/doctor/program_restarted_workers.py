# SPDX-License-Identifier: Apache-2.0
"""Workers are started for each epoch of 8 steps, and each takes 0.3 s to open its input."""

import time

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader


def open_storage(worker_id: int) -> None:
    time.sleep(0.3)


if __name__ == "__main__":
    samples = Samples(lambda index: compute(0.0003), count=128)
    loader = DataLoader(samples, batch_size=16, num_workers=2, worker_init_fn=open_storage)
    train(loader, lambda batch: compute(0.008))
