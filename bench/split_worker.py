# SPDX-License-Identifier: Apache-2.0
"""The cost of splitting a pool worker into several processes: batches per second of `penstock
worker`, whose server answers the trainer and whose job process makes the batches, against a worker
that does both in one process.

For each batch size two pools on loopback, of one worker each, serve two loaders of this process. A
round is a window of each, one after the other; the ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_process
import pool_samples
import process_tree
import torch
from figures import (
    MeasurementError,
    Record,
    add_window_options,
    bench_parser,
    log,
    median_interval,
    report,
    run_main,
    summary,
)
from pool_host import PoolError, PoolHost
from table import aligned, by_parameter, metric_cells

ROWS = 64  # of a batch
ROW_BYTES = {"small": 64, "1MB": 1 << 14}
KINDS = ("one_process", "processes")
BATCHES_MAX = 10_000_000


class Job:
    """A loader with one worker of the given kind."""

    def __init__(self, kind: str, host: PoolHost, row_bytes: int) -> None:
        from penstock import DataLoader, Pool

        if kind == "processes":
            host.start_command(1)
        else:
            host.start_workers(1)
            host.wait_for_workers(1)
        self._root_pid = host.supervisor_pid or host.workers[0].pid
        self._batches: Iterator[Any] = iter(
            DataLoader(
                pool_samples.Rows(ROWS * BATCHES_MAX, row_bytes, ROWS),
                batch_size=ROWS,
                pool=Pool(host.endpoint, keys=host.keys, code_paths=[pool_samples.CODE]),
                timeout=60,
            )
        )
        batch = next(self._batches)
        if tuple(batch.shape) != (ROWS, row_bytes) or batch.dtype != torch.uint8:
            raise MeasurementError(f"a batch of {kind} is {batch.dtype} {tuple(batch.shape)}")

    def take_for(self, seconds: float) -> tuple[int, float]:
        """How many batches, and the seconds that they took."""
        begin = now = time.perf_counter()
        count = 0
        while now < begin + seconds:
            next(self._batches)
            count += 1
            now = time.perf_counter()
        return count, now - begin

    def measure(self, warmup: float, seconds: float) -> dict[str, float]:
        self.take_for(warmup)
        pids = {"worker": self._worker_pids(), "trainer": [os.getpid()]}
        busy_s, before = process_tree.machine_busy_s(), _cpu_s(pids)
        count, took_s = self.take_for(seconds)
        used = {name: after - before[name] for name, after in _cpu_s(pids).items()}
        busy_s = process_tree.machine_busy_s() - busy_s
        return {
            "batches_per_s": count / took_s,
            "worker_cpu_s_per_batch": used["worker"] / count,
            "trainer_cpu_s_per_batch": used["trainer"] / count,
            "foreign_cores": max(0.0, busy_s - sum(used.values())) / took_s,
        }

    def _worker_pids(self) -> list[int]:
        return [self._root_pid, *process_tree.parents(self._root_pid)]


def _cpu_s(pids: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(one_process.cpu_s, of_one)) for name, of_one in pids.items()}


def measure_case(case: str, args: argparse.Namespace) -> Iterator[Record]:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as stack:
        jobs = {}
        for kind in KINDS:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            jobs[kind] = Job(kind, stack.enter_context(PoolHost(Path(folder))), ROW_BYTES[case])
        for index in range(args.rounds):
            log(f"{case}: round {index + 1} of {args.rounds}")
            for kind in KINDS[:: -1 if index % 2 else 1]:
                found[kind].append(jobs[kind].measure(args.warmup, args.seconds))
        jobs.clear()  # the loaders, before their pools
    parameters = {
        "case": case,
        "batch_bytes": ROWS * ROW_BYTES[case],
        "rows": ROWS,
        "seconds": args.seconds,
        "warmup": args.warmup,
    }
    for kind, windows in found.items():
        for metric in windows[0]:
            values = [window[metric] for window in windows]
            of_kind = {**parameters, "kind": kind}
            yield summary(f"split_worker/{metric}", of_kind, values, ndigits=9)
    rates = [[window["batches_per_s"] for window in found[kind]] for kind in KINDS]
    ratios = [several / one for one, several in zip(*rates, strict=True)]
    over = {**parameters, "kind": "processes", "over": "one_process"}
    yield summary("split_worker/ratio", over, ratios) | {"interval": median_interval(ratios)}


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(1)
    try:
        for case in args.only:
            yield from measure_case(case, args)
    except PoolError as error:
        raise MeasurementError(str(error)) from error


COLUMNS = (
    ("batches_per_s", "batches/s", 1.0, "{:.0f}"),
    ("worker_cpu_s_per_batch", "worker, CPU us per batch", 1e6, "{:.0f}"),
    ("trainer_cpu_s_per_batch", "trainer, CPU us per batch", 1e6, "{:.0f}"),
)


def table(everything: list[Record]) -> str:
    rows = [["batches", "worker", "of one process", *(title for _, title, _, _ in COLUMNS)]]
    for case in dict.fromkeys(record["parameters"]["case"] for record in everything):
        of_case = [record for record in everything if record["parameters"]["case"] == case]
        for kind, found in by_parameter(of_case, "kind").items():
            share = ""
            if "ratio" in found:
                low, high = found["ratio"]["interval"]
                share = f"{found['ratio']['median']:.3f} ({low:.3f}..{high:.3f})"
            cells = metric_cells(found, COLUMNS)
            rows.append([case, kind.replace("_", " "), share, *cells])
    return aligned(rows)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=ROW_BYTES, default=[*ROW_BYTES], help="batch sizes")
    add("--quick", action="store_true", help="smoke test: two short rounds")
    add_window_options(parser, rounds=15, seconds=3.0, warmup=0.5)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.warmup = 2, 0.3, 0.1
    return 2 if report("split_worker", args, measure_all, table) is None else 0


if __name__ == "__main__":
    run_main(main)
