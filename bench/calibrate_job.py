# SPDX-License-Identifier: Apache-2.0
"""One training of bench/calibrate.py: it trains for a fixed time on each batch, and prints how long
that took. Starts to train when a line arrives on standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import pool_samples
import torch

from penstock import DataLoader, Pool

SAMPLES_PER_BATCH = 4


def train(args: argparse.Namespace) -> dict[str, float]:
    begin = time.perf_counter()
    loader = DataLoader(
        pool_samples.FixedCost(
            args.batches * SAMPLES_PER_BATCH, args.worker_s / SAMPLES_PER_BATCH, values=16
        ),
        batch_size=SAMPLES_PER_BATCH,
        pool=Pool(args.pool, keys=args.keys, code_paths=[pool_samples.CODE]),
        timeout=60,
    )
    first_batch_s = 0.0
    batch: Any
    for count, batch in enumerate(loader):
        if count == 0:
            first_batch_s = time.perf_counter() - begin
        assert len(batch["pid"]) == SAMPLES_PER_BATCH
        time.sleep(args.step_s)
    return {"completion_s": time.perf_counter() - begin, "first_batch_s": first_batch_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--keys", required=True)
    parser.add_argument("--worker-s", type=float, required=True, help="worker seconds per batch")
    parser.add_argument("--step-s", type=float, required=True, help="trainer seconds per batch")
    parser.add_argument("--batches", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(train(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
