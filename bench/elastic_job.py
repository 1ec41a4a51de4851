# SPDX-License-Identifier: Apache-2.0
"""A training of bench/elastic.py: elastic_job.py KIND POOL SECONDS BATCH_S STEP_S.

A step sleeps, and so does each sample, so that few cores can simulate many. KIND is "ready" for a
loop over batches that are there, "torch" for torch's loader with one worker, and "penstock" for the
workers of POOL. Prints the clock, in seconds, at the start of the program and at the end of each
step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

SAMPLES_PER_BATCH = 4
_COUNT = 1 << 20  # samples; no run reaches their end


class Sleeping(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._sample_s)
        return torch.full((1024,), float(index))


def batches_of(kind: str, pool: str, batch_s: float) -> Iterable[Any]:
    dataset = Sleeping(batch_s / SAMPLES_PER_BATCH)
    if kind == "torch":
        return torch.utils.data.DataLoader(dataset, SAMPLES_PER_BATCH, num_workers=1)
    if kind == "penstock":
        from penstock import DataLoader

        return DataLoader(dataset, SAMPLES_PER_BATCH, pool=pool)
    batch = torch.zeros(SAMPLES_PER_BATCH, 1024)
    return (batch for _ in range(_COUNT))


def main() -> None:
    kind, pool, seconds, batch_s, step_s = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:6])
    begun = time.monotonic()
    print(f"{begun:.4f}", flush=True)
    for _ in batches_of(kind, pool, batch_s):
        time.sleep(step_s)
        now = time.monotonic()
        print(f"{now:.4f}", flush=True)
        if now - begun >= seconds:
            break


if __name__ == "__main__":
    main()
