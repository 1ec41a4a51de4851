# SPDX-License-Identifier: Apache-2.0
"""One batch in eight takes 25 times as long as the others, and one batch is asked for ahead. On
average the worker is faster than the program, which waits for a device."""

import time

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader

BATCH = 16


def work(index: int) -> None:
    compute(0.0075 if index // BATCH % 8 == 0 else 0.0003)


if __name__ == "__main__":
    loader = DataLoader(
        Samples(work),
        batch_size=BATCH,
        num_workers=1,
        prefetch_factor=1,
        persistent_workers=True,
    )
    train(loader, lambda batch: time.sleep(0.03))
