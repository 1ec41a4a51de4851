# SPDX-License-Identifier: Apache-2.0
"""One sample in 256 takes 1.2 s, and the others 0.3 ms."""

from planted_work import Samples, compute, train
from torch.utils.data import DataLoader


def work(index: int) -> None:
    compute(1.2 if index % 256 == 100 else 0.0003)


if __name__ == "__main__":
    loader = DataLoader(Samples(work), batch_size=16, num_workers=2, persistent_workers=True)
    train(loader, lambda batch: compute(0.003))
