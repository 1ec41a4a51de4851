# SPDX-License-Identifier: Apache-2.0
"""Short jobs in sequence on the pool of PENSTOCK_POOL, each compared bit for bit with torch's
loader: a program for tests of a pool with many jobs. It prints the number of each finished job.

    python short_jobs.py FIRST COUNT
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from pool_datasets import CODE, Logarithms

from penstock import DataLoader, Pool


def run_job(number: int, pool: str) -> None:
    """Run two epochs of a few batches. No two jobs have the same dataset or order."""
    rng = random.Random(number)
    count = rng.randint(12, 40)
    options = {
        "batch_size": rng.randint(2, 8),
        "sampler": rng.sample(range(count), count),
        "drop_last": number % 2 == 0,
    }
    expected = batches_of(torch.utils.data.DataLoader(Logarithms(count), **options))
    loader = DataLoader(
        Logarithms(count), pool=Pool(pool, code_paths=[CODE]), timeout=60, **options
    )
    for epoch in range(2):
        found = batches_of(loader)
        assert found == expected, f"epoch {epoch} of job {number} is not torch's"


def batches_of(loader: Iterable[Any]) -> list[tuple[tuple[int, ...], bytes]]:
    return [(tuple(batch.shape), batch.numpy().tobytes()) for batch in loader]


def main() -> None:
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:])
    for number in range(first, first + count):
        run_job(number, os.environ["PENSTOCK_POOL"])
        print(f"job {number} is done", flush=True)


if __name__ == "__main__":
    main()
