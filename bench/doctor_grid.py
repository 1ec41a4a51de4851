# SPDX-License-Identifier: Apache-2.0
"""Times an empty loop over a workload with options of its loader, one loader after the other:
bench/doctor.py starts this and reads its lines, one for each set of options."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from doctor_program import loader_of

WARM_BATCHES_MIN = 2
BATCHES_MIN = 2


def batches_per_s(loader: Any, warm_s: float, seconds: float) -> float:
    batches = _endless(loader)
    count, until = 0, time.perf_counter() + warm_s
    while time.perf_counter() < until or count < WARM_BATCHES_MIN + loader.num_workers - 1:
        next(batches)
        count += 1
    begin = now = time.perf_counter()
    count = 0
    while now < begin + seconds or count < BATCHES_MIN:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count / (now - begin)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--warmup", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--options", required=True, help="list of options, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for options in json.loads(args.options):
        torch.manual_seed(0)
        loader = loader_of(args.workload, args.data, args.quick, options)
        rate = batches_per_s(loader, args.warmup, args.seconds)
        print(json.dumps({"options": options, "batches_per_s": rate}), flush=True)
        del loader


if __name__ == "__main__":
    main()
