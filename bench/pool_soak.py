# SPDX-License-Identifier: Apache-2.0
"""Does a long-running pool release its resources? Epoch after epoch workers join and leave, by
turns drained and killed, and after each epoch memory, descriptors and threads of the trainer, the
controller and the remaining worker are counted.

A line is fitted through the epochs after the warm-up. Descriptors and threads may not grow at all
and memory by no more than ``--limit-kb`` an epoch; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import one_process
import pool_samples
import process_tree
import torch
from figures import MeasurementError, Record, bench_parser, log, report, run_main, summary
from pool_host import PoolError, PoolHost

SAMPLES_PER_BATCH = 4
WARMUP_EPOCHS = 4
MISSED = "MISSED"

Counts = dict[str, dict[str, float]]  # process -> resource -> amount


def count_all(host: PoolHost, steady_pid: int) -> Counts:
    gc.collect()
    pids = {"trainer": os.getpid(), "controller": host.controller_pid, "worker": steady_pid}
    return {
        name: {
            "private_bytes": float(one_process.private_bytes(pid)),
            "rss_bytes": float(one_process.rss_bytes(pid)),
            "fds": float(one_process.fd_count(pid)),
            "threads": float(one_process.thread_count(pid)),
        }
        for name, pid in pids.items()
    }


def soak(host: PoolHost, args: argparse.Namespace) -> tuple[list[Counts], list[float], int]:
    """The counts after each epoch, the seconds of each, and how many workers joined and left."""
    from penstock import DataLoader, Pool

    host.start_workers(1)
    host.wait_for_workers(1)
    steady = host.workers[0].pid
    dataset = pool_samples.FixedCost(args.batches * SAMPLES_PER_BATCH, 0.0, args.values)
    loader = DataLoader(
        dataset,
        batch_size=SAMPLES_PER_BATCH,
        shuffle=True,
        pool=Pool(host.endpoint, keys=host.keys, code_paths=[pool_samples.CODE]),
        persistent_workers=args.persistent,
        timeout=60,
    )
    after: list[Counts] = []
    seconds: list[float] = []
    left_count = 0
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        expected = sum(range(args.batches * SAMPLES_PER_BATCH))
        turns = {(args.batches * (turn + 1)) // (args.turns + 1) for turn in range(args.turns)}
        host.start_workers(args.turns)
        for number, batch in enumerate(loader):
            host.take_news()
            expected -= int(batch["index"].sum())
            if number in turns and len(host.workers) > 1:
                how = signal.SIGKILL if left_count % 2 else signal.SIGTERM
                host.end_worker(host.workers[1].pid, how)
                left_count += 1
            del batch
        if expected != 0:
            raise MeasurementError(f"epoch {epoch} did not deliver every sample once")
        seconds.append(time.perf_counter() - begin)
        host.wait_for_workers(1)
        after.append(count_all(host, steady))
        log(f"epoch {epoch + 1} of {args.epochs}: {seconds[-1]:.1f} s, {left_count} have left")
    return after, seconds, left_count


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, PoolHost(Path(folder)) as host:
            busy_s, tree_s = process_tree.machine_busy_s(), process_tree.usage(os.getpid()).cpu_s
            begin = time.perf_counter()
            after, seconds, left_count = soak(host, args)
            tree_s = process_tree.usage(os.getpid()).cpu_s - tree_s
            busy_s = process_tree.machine_busy_s() - busy_s
            foreign = max(0.0, busy_s - tree_s) / (time.perf_counter() - begin)
    except (PoolError, RuntimeError) as error:
        raise MeasurementError(str(error)) from error
    except PermissionError as error:
        raise MeasurementError(
            "only root can read the memory of a controller; run this as root"
        ) from error
    parameters = {
        "epochs": args.epochs,
        "batches": args.batches,
        "left_workers": left_count,
        "persistent_workers": args.persistent,
        "warmup_epochs": min(WARMUP_EPOCHS, args.epochs // 2),
        "limit_bytes": args.limit_kb * 1024,
    }
    for whose, counts in after[0].items():
        for what in counts:
            values = [one[whose][what] for one in after]
            record = summary(f"pool_soak/{what}", {**parameters, "kind": whose}, values)
            yield record | growth(values, parameters["warmup_epochs"])
    rates = [args.batches / epoch_s for epoch_s in seconds]
    yield summary("pool_soak/batches_per_s", {**parameters, "kind": "trainer"}, rates)
    yield summary("pool_soak/foreign_cores", {**parameters, "kind": "all"}, [foreign])


def growth(values: list[float], warmup: int) -> Record:
    """The line through the values after the warm-up: the growth per epoch, and its 95% interval;
    with the first and last of the values."""
    kept = numpy.asarray(values[warmup:])
    epochs = numpy.arange(len(kept), dtype=float)
    spread = float(((epochs - epochs.mean()) ** 2).sum())
    if spread == 0.0:
        return {"slope": 0.0, "slope_interval": [0.0, 0.0], "ends": [values[0], values[-1]]}
    slope = float(((epochs - epochs.mean()) * (kept - kept.mean())).sum() / spread)
    left_over = kept - kept.mean() - slope * (epochs - epochs.mean())
    error = float(numpy.sqrt((left_over**2).sum() / max(len(kept) - 2, 1) / spread))
    return {
        "slope": round(slope, 3),
        "slope_interval": [round(slope - 2 * error, 3), round(slope + 2 * error, 3)],
        "ends": [values[warmup], values[-1]],
    }


def verdict(record: Record) -> str:
    """Missed: resources that certainly grow, and by more than is allowed."""
    what = record["name"].partition("/")[2]
    limit = record["parameters"]["limit_bytes"] if what.endswith("_bytes") else 0.05
    if record["slope"] <= limit:
        return "met"
    return MISSED if record["slope_interval"][0] > limit else "open"


def table(everything: list[Record]) -> str:
    lines = [
        "| process | measured | after the warm-up | at the end | growth per epoch | 95% interval "
        "| limit | verdict |",
        "|" + " --- |" * 8,
    ]
    for record in everything:
        if "slope" not in record:
            continue
        what = record["name"].partition("/")[2]
        is_memory = what.endswith("_bytes")
        unit, scale = ("MB", 1e6) if is_memory else ("", 1.0)
        limit = f"{record['parameters']['limit_bytes'] / 1e3:.0f} kB" if is_memory else "0"
        more = (
            [f"{value / 1e3:.1f} kB" for value in (record["slope"], *record["slope_interval"])]
            if is_memory
            else [f"{value:.2f}" for value in (record["slope"], *record["slope_interval"])]
        )
        first, last = (f"{value / scale:.6g} {unit}".strip() for value in record["ends"])
        lines.append(
            f"| {record['parameters']['kind']} | {what.removesuffix('_bytes')} | {first} | {last} "
            f"| {more[0]} | {more[1]}..{more[2]} | {limit} | {verdict(record)} |"
        )
    for record in everything:
        if record["name"] == "pool_soak/batches_per_s":
            parameters = record["parameters"]
            lines.append(
                f"\n{parameters['epochs']} epochs of {parameters['batches']} batches at "
                f"{record['median']:.0f} per second ({record['p10']:.0f}..{record['p90']:.0f}), "
                f"{parameters['left_workers']} workers left, half of them killed."
            )
    return "\n".join(lines)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=20)
    add("--batches", type=int, default=1000, help="batches per epoch")
    add("--turns", type=int, default=2, help="workers that join and leave per epoch")
    add("--values", type=int, default=4096, help="floats in a sample; a batch has 4 samples")
    add("--limit-kb", type=float, default=256.0, help="limit of memory growth per epoch")
    add("--persistent", action="store_true", help="use one iterator for all epochs")
    add("--quick", action="store_true", help="smoke test: 3 epochs of 60 batches")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.batches = 3, 60
    if args.epochs < 1 or args.batches < 2 * (args.turns + 1) or args.turns < 0:
        parser.error("--epochs, --batches and --turns are inconsistent; see their defaults")
    done = report("pool_soak", args, measure_all, table)
    if done is None:
        return 2
    missed = any("slope" in record and verdict(record) == MISSED for record in done)
    return 1 if missed and not args.quick else 0


if __name__ == "__main__":
    run_main(main)
