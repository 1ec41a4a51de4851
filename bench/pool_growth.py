# SPDX-License-Identifier: Apache-2.0
"""The throughput that a pool's workers add to a running job: batches per second as 1, 2, 4, ... 64
of them join.

A batch takes a fixed time in which its worker sleeps, so that few cores can simulate many machines,
and the ideal is workers over that time. The trainer, the controller and each worker are separate
processes with real sockets. Also measured: the CPU time per batch of the trainer and the
controller, how soon a joining worker is of use, and how long the stream pauses while workers join.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import one_process
import pool_samples
import process_tree
import torch
from figures import MeasurementError, Record, bench_parser, log, report, run_main, summary
from growth_picture import draw
from pool_host import PoolError, PoolHost, StartedWorker
from table import aligned, by_parameter, metric_cells

HERE = Path(__file__).resolve().parent
SAMPLES_PER_BATCH = 8
JOIN_S_MAX = 120.0  # until the last joining worker has sent a batch
BATCHES_MAX = 10_000_000


@dataclass(slots=True)
class Use:
    """CPU time so far."""

    at: float
    trainer_s: float
    io_s: float  # of the thread that communicates with the workers
    zmq_s: float  # of ZeroMQ's thread, which encrypts
    controller_s: float
    machine_s: float
    tree_s: float
    faults: int

    @classmethod
    def now(cls, controller_pid: int) -> Use:
        own = one_process.cpu_s_of_threads(os.getpid())
        return cls(
            at=time.perf_counter(),
            trainer_s=sum(own.values()),
            io_s=own.get("pk_pool_io", 0.0),
            zmq_s=sum(seconds for name, seconds in own.items() if name.startswith("ZMQ")),
            controller_s=one_process.cpu_s(controller_pid),
            machine_s=process_tree.machine_busy_s(),
            tree_s=process_tree.usage(os.getpid()).cpu_s,
            faults=one_process.minor_faults(os.getpid()),
        )


@dataclass(slots=True)
class Stage:
    """The measurements with one number of workers."""

    worker_count: int
    rates: list[float] = field(default_factory=list)
    trainer_us: list[float] = field(default_factory=list)  # CPU time of a batch
    io_us: list[float] = field(default_factory=list)
    zmq_us: list[float] = field(default_factory=list)
    controller_us: list[float] = field(default_factory=list)
    controller_ms_per_s: list[float] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)  # of each that joined
    delivers_s: list[float] = field(default_factory=list)
    join_pause_s: float = 0.0
    steady_pause_s: float = 0.0


class Growth:
    """A running job, and the events of its stream."""

    def __init__(self, host: PoolHost, args: argparse.Namespace) -> None:
        from penstock import DataLoader, Pool

        self._host = host
        self._args = args
        dataset = pool_samples.FixedCost(
            BATCHES_MAX, args.batch_ms / 1e3 / SAMPLES_PER_BATCH, args.values
        )
        self._batches = iter(
            DataLoader(
                dataset,
                batch_size=SAMPLES_PER_BATCH,
                pool=Pool(host.endpoint, keys=host.keys, code_paths=[pool_samples.CODE]),
                timeout=60,
            )
        )
        self._seen: dict[int, tuple[float, float]] = {}  # pid: first started, first delivered
        self._last = time.perf_counter()
        self.longest_pause_s = 0.0

    def take(self) -> None:
        """The next batch."""
        batch: Any = next(self._batches)
        now_ns = time.monotonic_ns()
        now = time.perf_counter()
        if self._seen:  # before, there was no stream to pause
            self.longest_pause_s = max(self.longest_pause_s, now - self._last)
        self._last = now
        pid = int(batch["pid"][0])
        if pid not in self._seen:
            self._seen[pid] = (int(batch["begun_ns"][0]) / 1e9, now_ns / 1e9)

    def take_for(self, seconds: float) -> int:
        self.longest_pause_s = 0.0
        end = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end:
            self.take()
            count += 1
        return count

    def grow(self, worker_count: int) -> Stage:
        """Has workers join up to this number, and measures."""
        stage = Stage(worker_count)
        joining: list[StartedWorker] = []
        wanted = worker_count - len(self._host.workers)
        self._host.start_workers(wanted)
        deadline = time.perf_counter() + JOIN_S_MAX
        self.longest_pause_s = 0.0
        self._last = time.perf_counter()
        while len(joining) < wanted or any(worker.pid not in self._seen for worker in joining):
            if not self._seen and not self._host.workers:
                joining += self._host.take_news(1.0)  # without any worker there is no stream
            else:
                self.take()
                joining += self._host.take_news()
            if time.perf_counter() > deadline:
                raise MeasurementError(
                    f"fewer than {wanted} workers joined within {JOIN_S_MAX:.0f} s"
                )
        stage.join_pause_s = self.longest_pause_s
        for worker in joining:
            begun_s, delivered_s = self._seen[worker.pid]
            stage.begins_s.append(begun_s - worker.listens_ns / 1e9)
            stage.delivers_s.append(delivered_s - worker.listens_ns / 1e9)
        self.take_for(self._args.warmup)
        for _ in range(self._args.windows):
            before = Use.now(self._host.controller_pid)
            count = self.take_for(self._args.seconds)
            after = Use.now(self._host.controller_pid)
            seconds = after.at - before.at
            stage.rates.append(count / seconds)
            stage.trainer_us.append((after.trainer_s - before.trainer_s) / count * 1e6)
            stage.io_us.append((after.io_s - before.io_s) / count * 1e6)
            stage.zmq_us.append((after.zmq_s - before.zmq_s) / count * 1e6)
            controller_s = after.controller_s - before.controller_s
            stage.controller_us.append(controller_s / count * 1e6)
            stage.controller_ms_per_s.append(controller_s / seconds * 1e3)
            busy_s, tree_s = after.machine_s - before.machine_s, after.tree_s - before.tree_s
            stage.busy_cores.append(busy_s / seconds)
            stage.foreign_cores.append(max(0.0, busy_s - tree_s) / seconds)
            stage.faults.append((after.faults - before.faults) / count)
            stage.steady_pause_s = max(stage.steady_pause_s, self.longest_pause_s)
        return stage


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(1)
    stages = []
    try:
        with tempfile.TemporaryDirectory() as folder, PoolHost(Path(folder)) as host:
            growth = Growth(host, args)
            for worker_count in args.workers:
                log(f"{worker_count} workers")
                stages.append(growth.grow(worker_count))
                yield from records(stages[-1], stages[0], args)
            del growth
    except (PoolError, RuntimeError) as error:
        raise MeasurementError(str(error)) from error
    if args.picture is not None:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        args.picture.write_text(picture(stages, args))


def picture(stages: list[Stage], args: argparse.Namespace) -> str:
    return draw(
        [stage.worker_count for stage in stages],
        ideal=[stage.worker_count / (args.batch_ms / 1e3) for stage in stages],
        rates=[statistics.median(stage.rates) for stage in stages],
        trainer_us=[statistics.median(stage.trainer_us) for stage in stages],
        controller_us=[statistics.median(stage.controller_us) for stage in stages],
    )


def records(stage: Stage, first: Stage, args: argparse.Namespace) -> Iterator[Record]:
    parameters = {
        "workers": stage.worker_count,
        "batch_ms": args.batch_ms,
        "batch_bytes": SAMPLES_PER_BATCH * args.values * 4,
        "seconds": args.seconds,
        "warmup_s": args.warmup,
    }
    ideal = stage.worker_count / (args.batch_ms / 1e3)
    metrics = {
        "batches_per_s": stage.rates,
        "of_ideal": [rate / ideal for rate in stage.rates],
        "trainer_us": stage.trainer_us,
        "trainer_io_us": stage.io_us,
        "trainer_zmq_us": stage.zmq_us,
        "controller_us": stage.controller_us,
        "controller_ms_per_s": stage.controller_ms_per_s,
        "trainer_faults": stage.faults,
        "first_begun_s": stage.begins_s,
        "first_delivered_s": stage.delivers_s,
        "join_pause_s": [stage.join_pause_s],
        "steady_pause_s": [stage.steady_pause_s],
        "busy_cores": stage.busy_cores,
        "foreign_cores": stage.foreign_cores,
    }
    for metric, values in metrics.items():
        yield summary(f"pool_growth/{metric}", parameters, values, ndigits=6)


COLUMNS = (
    ("batches_per_s", "batches/s", 1.0, "{:.1f}"),
    ("of_ideal", "of ideal", 1.0, "{:.3f}"),
    ("trainer_us", "trainer, CPU us per batch", 1.0, "{:.0f}"),
    ("trainer_io_us", "its I/O thread", 1.0, "{:.0f}"),
    ("trainer_zmq_us", "ZeroMQ's thread", 1.0, "{:.0f}"),
    ("controller_us", "controller, CPU us per batch", 1.0, "{:.0f}"),
    ("controller_ms_per_s", "controller, CPU ms per second", 1.0, "{:.2f}"),
    ("trainer_faults", "faults per batch", 1.0, "{:.1f}"),
    ("first_begun_s", "first work after, ms", 1e3, "{:.0f}"),
    ("first_delivered_s", "first batch after, ms", 1e3, "{:.0f}"),
    ("join_pause_s", "longest pause while joining, ms", 1e3, "{:.0f}"),
    ("steady_pause_s", "after, ms", 1e3, "{:.0f}"),
    ("busy_cores", "cores busy", 1.0, "{:.2f}"),
)


def table(everything: list[Record]) -> str:
    rows = [["workers", *(title for _, title, _, _ in COLUMNS)]]
    for worker_count, found in by_parameter(everything, "workers").items():
        rows.append([str(worker_count), *metric_cells(found, COLUMNS)])
    return aligned(rows)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="numbers of workers",
    )
    add("--batch-ms", type=float, default=250.0, help="worker time per batch")
    add("--values", type=int, default=2048, help="floats in a sample; a batch has 8 samples")
    add("--windows", type=int, default=5, help="measurements per number of workers")
    add("--seconds", type=float, default=2.0, help="seconds of a measurement")
    add("--warmup", type=float, default=2.0, help="seconds after the last worker joined")
    add("--quick", action="store_true", help="smoke test with 1 and 2 workers")
    add("--picture", type=Path, metavar="FILE", help="output SVG of rates and costs")
    args = parser.parse_args()
    if args.quick:
        args.workers, args.windows, args.seconds, args.warmup = [1, 2], 2, 0.3, 0.1
        args.batch_ms = 40.0
    if sorted(set(args.workers)) != args.workers or args.workers[0] < 1:
        parser.error(f"--workers must be increasing numbers >= 1, got {args.workers}")
    return 2 if report("pool_growth", args, measure_all, table) is None else 0


if __name__ == "__main__":
    run_main(main)
