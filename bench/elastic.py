# SPDX-License-Identifier: Apache-2.0
"""The benefit of a pool that grows by itself for a job that is starved with one local worker.

A batch takes a worker 12 times as long as the trainer's step. The pool's workers are jobs of real
daemons of Slurm: three nodes of eight places, which this machine simulates, since samples sleep.
While the job trains, the pool grows from zero workers, a node dies with all that runs on it, and a
second job of the same kind starts and ends. For comparison: the same loop on batches that are ready
(the ceiling), and torch's loader with one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from elastic_picture import Curve, draw
from figures import MeasurementError, Record, add_report_options, report, summary

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "python"))

STEP_S, BATCH_S = 0.05, 0.6
NODES, PLACES, WORKERS_MAX = 3, 8, 16
SHORT_S = 12.0  # a run of the ceiling, and of one worker
RAMP_S = 2.0  # at its start, excluded from the results
NODE_DIES_S, SECOND_COMES_S, SECOND_GOES_S, FIRST_ENDS_S = 60.0, 120.0, 175.0, 225.0
AT_HAND_S = 45.0  # a job that finds workers there
WINDOW_S = 5.0  # over which a rate is taken
SHARE = 0.98
PARAMETERS = {"batch_s": BATCH_S, "step_s": STEP_S, "workers_max": WORKERS_MAX}


@dataclass
class Job:
    """A training in a separate process."""

    kind: str
    seconds: float
    pool: str = "none"
    at: list[float] = field(default_factory=list)  # its start, then the end of each step

    def __post_init__(self) -> None:
        numbers = [str(one) for one in (self.seconds, BATCH_S, STEP_S)]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "elastic_job.py"), self.kind, self.pool, *numbers],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.at.append(float(line))

    def wait(self) -> None:
        self._reader.join()
        if self._process.wait() != 0:
            raise MeasurementError(f"the training {self.kind} failed")

    def kill(self) -> None:
        self._process.kill()
        self._reader.join()
        self._process.wait()

    def rate(self, begin: float, end: float) -> float:
        """Steps a second in an interval of the clock."""
        return sum(begin < at <= end for at in self.at[1:]) / (end - begin)

    def reaches(self, rate: float, begin: float) -> float | None:
        """Seconds from ``begin`` until the first window with that rate is full."""
        ends = [at for at in self.at[1:] if at >= begin + WINDOW_S]
        return next((at - begin for at in ends if self.rate(at - WINDOW_S, at) >= rate), None)


class Watch:
    """The pool's status, over time."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.seen: list[tuple[float, list[int]]] = []  # workers of each trainer, in their order
        self._known: list[str] = []
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        from penstock import _pool

        while not self._is_over.wait(0.25):
            with contextlib.suppress(Exception):
                status = json.loads(_pool.pool_status(self._endpoint, None, 5.0))
                workers = {one["id"]: one["workers"] for one in status["trainers"]}
                self._known += [one for one in workers if one not in self._known]
                counts = [workers.get(one, 0) for one in self._known]
                self.seen.append((time.monotonic(), counts))

    def count_changes(self, begin: float, end: float) -> int:
        counts = [counts for at, counts in self.seen if begin < at <= end]
        return sum(a != b for a, b in zip(counts, counts[1:], strict=False))

    def end(self) -> None:
        self._is_over.set()
        self._watcher.join()


def kill_largest_node(pool: Any) -> int:
    """The node with most workers, with all that runs there. Returns how many workers that is."""
    names_of: dict[str, list[str]] = {}
    for name in pool.processes():
        names_of.setdefault(pool.node_of(name), []).append(name)
    names = max(names_of.values(), key=len)
    pool.kill_node(names[0])
    return len(names)


def figure(name: str, values: list[float]) -> Record:
    return summary(name, PARAMETERS, values)


def run_short(kind: str) -> float:
    job = Job(kind, SHORT_S)
    job.wait()
    return job.rate(job.at[1] + RAMP_S, job.at[-1])


def run_story(args: argparse.Namespace, ceiling: float) -> Iterator[Record]:
    import pytest
    from engine_pools import SlurmPool
    from slurm_cluster import MISSING

    if MISSING:
        raise MeasurementError(f"Slurm is not installed: no {', '.join(MISSING)}")

    class Nodes(SlurmPool):
        node_count, place_count = NODES, PLACES

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pk")))
        pool = Nodes(folder, stack.enter_context(pytest.MonkeyPatch.context()))
        stack.callback(pool.close)
        pool.up("--max", str(WORKERS_MAX), "--idle", "60")
        endpoint = pool.pool.endpoint
        watch = Watch(endpoint)
        stack.callback(watch.end)
        first = Job("penstock", FIRST_ENDS_S, endpoint)
        stack.callback(first.kill)
        while not first.at:
            time.sleep(0.05)
        begun = first.at[0]

        def wait_until(second: float) -> float:
            time.sleep(max(0.0, begun + second - time.monotonic()))
            return time.monotonic()

        died_at = wait_until(NODE_DIES_S)
        lost_count = kill_largest_node(pool)
        wait_until(SECOND_COMES_S)
        second = Job("penstock", SECOND_GOES_S - SECOND_COMES_S, endpoint)
        stack.callback(second.kill)
        second.wait()
        gone_at = second.at[-1]
        first.wait()
        third = Job("penstock", AT_HAND_S, endpoint)
        stack.callback(third.kill)
        third.wait()

    settled = first.reaches(SHARE * ceiling, begun)
    alone = first.rate(begun + NODE_DIES_S - 20, begun + NODE_DIES_S)
    yield figure("elastic/pool/batches_per_s", [alone])
    yield figure("elastic/pool/share_of_ceiling", [alone / ceiling])
    both = (second.at[-1] - 25, second.at[-1])
    yield figure("elastic/two_jobs/share_of_ceiling_first", [first.rate(*both) / ceiling])
    yield figure("elastic/two_jobs/share_of_ceiling_second", [second.rate(*both) / ceiling])
    yield from when("elastic/from_zero_s", settled)
    yield from when("elastic/at_hand_s", third.reaches(SHARE * ceiling, third.at[0]))
    yield figure("elastic/first_batch_from_zero_s", [first.at[1] - begun - STEP_S])
    yield figure("elastic/first_batch_at_hand_s", [third.at[1] - third.at[0] - STEP_S])
    yield figure("elastic/node/workers_lost", [float(lost_count)])
    longest = max(b - a for a, b in zip(first.at[1:], first.at[2:], strict=False) if b > died_at)
    yield figure("elastic/node/longest_pause_s", [longest])
    yield from when("elastic/node/recovered_s", first.reaches(SHARE * ceiling, died_at + WINDOW_S))
    yield from when("elastic/second/recovered_s", first.reaches(SHARE * ceiling, gone_at))
    steady = (begun + (settled or 30.0) + 5, begun + NODE_DIES_S)
    yield figure("elastic/steady/changes", [float(watch.count_changes(*steady))])
    if args.picture is not None:
        events = [
            (NODE_DIES_S, f"a node dies with {lost_count} workers"),
            (second.at[0] - begun, "a second job starts"),
            (gone_at - begun, "it has ended"),
        ]
        rates = [rates_of("first job", first, begun), rates_of("second job", second, begun)]
        counts = [
            Curve(name, [(at - begun, c[place]) for at, c in watch.seen if len(c) > place])
            for place, name in enumerate(("first job", "second job"))
        ]
        args.picture.write_text(draw(FIRST_ENDS_S, ceiling, rates, counts, events))


def when(name: str, seconds: float | None) -> Iterator[Record]:
    """No record for a batch that never arrived."""
    if seconds is None:
        print(f"{name}: never", file=sys.stderr)
    else:
        yield figure(name, [seconds])


def rates_of(name: str, job: Job, begun: float) -> Curve:
    first, last = job.at[0] - begun, job.at[-1] - begun
    points, at = [], first + 1.0
    while at <= last:
        points.append((at, job.rate(begun + at - 1.0, begun + at)))
        at += 1.0
    return Curve(name, points)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    ready, one = [], []
    for _ in range(args.rounds):
        ready.append(run_short("ready"))
        one.append(run_short("torch"))
    yield figure("elastic/ceiling/batches_per_s", ready)
    yield figure("elastic/one_worker/batches_per_s", one)
    shares = [b / a for a, b in zip(ready, one, strict=True)]
    yield figure("elastic/one_worker/share_of_ceiling", shares)
    gains = []
    for record in run_story(args, median(ready)):
        if record["name"] == "elastic/pool/batches_per_s":
            gains.append(record["median"] / median(one))
        yield record
    yield figure("elastic/pool/of_one_worker", gains)


def render(records: list[Record]) -> str:
    rows = ["| figure | value |", "| --- | ---: |"]
    return "\n".join([*rows, *(f"| {one['name']} | {one['median']:.3g} |" for one in records)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of the ceiling and of one worker"
    )
    add_report_options(parser)
    parser.add_argument("--picture", type=Path, help="output SVG of workers and batches over time")
    args: Any = parser.parse_args()
    return 0 if report("elastic.py", args, measure, render) is not None else 2


if __name__ == "__main__":
    sys.exit(main())
