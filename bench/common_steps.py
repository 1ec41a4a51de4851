# SPDX-License-Identifier: Apache-2.0
"""The cost of agreement on steps between ranks with an iterable dataset.

Two ranks, processes of this machine over gloo, read samples that cost nothing and sleep between the
steps. With remainder="uneven" there is no agreement. The time is measured in next() of the trainer;
the requests are sent by one rank's thread to the job's store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned, number
from torch.utils.data import IterableDataset

from penstock import DataLoader, Ranks

RANKS = 2
SECONDS_MAX = 300


class Zeros(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            yield torch.zeros(8)


class CountedStore:
    """The store of a rank's thread, whose requests are counted."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.request_count = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.request_count += 1
            return call(*arguments)

        return counted


def rank_main(case: dict[str, Any]) -> None:
    """Prints the times of next(), in microseconds, and the requests in a second."""
    dist.init_process_group("gloo")
    workers = case["workers"]
    loader = DataLoader(
        Zeros(case["steps"]),
        ranks=Ranks(remainder=case["remainder"]),
        shards=RANKS,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
    )
    iterator = iter(loader)
    next(iterator)
    counted = None
    if loader._run.step_agreement is not None:
        exchange = loader._run.step_agreement._exchange
        counted = exchange._store = CountedStore(exchange._store)
    dist.barrier()
    begin = time.perf_counter()
    times_us = []
    for _ in range(case["steps"] - 1):
        time.sleep(case["step_s"])
        called_at = time.perf_counter()
        next(iterator)
        times_us.append(1e6 * (time.perf_counter() - called_at))
    seconds = time.perf_counter() - begin
    requests_per_s = counted.request_count / seconds if counted is not None else 0.0
    print(json.dumps([times_us, requests_per_s]))
    dist.barrier()
    dist.destroy_process_group()


def run(case: dict[str, Any]) -> list[Any]:
    """The last line of each rank."""
    # Its port is certainly free, unlike one that was looked for before the ranks start.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_job = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are clients of it
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps(case)],
            env={**os.environ, **of_job, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS_MAX)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    if any(rank.returncode for rank in ranks):
        raise MeasurementError(f"a rank failed in the case {case}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(args: argparse.Namespace) -> Iterator[Record]:
    for workers, step_s in itertools.product((1, 0), args.step_s):
        steps = max(3, round(args.seconds / step_s))
        for remainder in ("uneven", "drop"):
            parameters = {"workers": workers, "step_s": step_s, "remainder": remainder}
            found = run({**parameters, "steps": steps})
            times_us = [time_us for of_rank, _ in found for time_us in of_rank]
            yield summary("common_steps/next_us", parameters, times_us)
            rates = [requests_per_s for _, requests_per_s in found]
            yield summary("common_steps/requests_per_s", parameters, rates)


def table(everything: list[Record]) -> str:
    rows = [["workers", "step", "remainder", "next(), median", "90 %", "requests per second"]]
    for one, other in zip(everything[::2], everything[1::2], strict=True):
        of = one["parameters"]
        rows.append(
            [
                str(of["workers"]),
                f"{number(1e3 * of['step_s'])} ms",
                of["remainder"],
                f"{one['median']:.0f} µs",
                f"{one['p90']:.0f} µs",
                f"{other['median']:.0f}",
            ]
        )
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_options(parser)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="smoke test with few steps")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds of each measurement (default: 5)"
    )
    args = parser.parse_args()
    args.step_s = [0.02] if args.quick else [0.02, 0.1]
    args.seconds = 0.2 if args.quick else args.seconds
    return args


def main() -> int:
    args = parse_arguments()
    if args.rank is not None:
        rank_main(args.rank)
        return 0
    done = report("common_steps", args, measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
