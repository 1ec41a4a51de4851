# SPDX-License-Identifier: Apache-2.0
"""A trainer of bench/first_jobs.py: first_jobs_trainer.py POOL. Reads two epochs from the workers
of POOL, and prints as JSON how long the first batch of each took from iter() on, in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pool_samples
import torch

from penstock import DataLoader, Pool

SAMPLES_PER_BATCH = 4
BATCHES = 16


def first_batch_s(loader: DataLoader[Any]) -> float:
    """Of an epoch, which is read to its end: the next one uses the same connections."""
    begin = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    took = time.perf_counter() - begin
    assert os.getpid() not in batch["pid"]
    for _ in batches:
        pass
    return took


def main() -> None:
    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(
        pool_samples.FixedCost(BATCHES * SAMPLES_PER_BATCH, 0.0, values=16),
        batch_size=SAMPLES_PER_BATCH,
        seeding="batch",
        pool=Pool(sys.argv[1], code_paths=[pool_samples.CODE]),
        timeout=60,
    )
    first_s = first_batch_s(loader)
    second_s = first_batch_s(loader)
    print(json.dumps({"first_s": first_s, "second_s": second_s}))


if __name__ == "__main__":
    main()
