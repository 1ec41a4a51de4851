# SPDX-License-Identifier: Apache-2.0
"""How fast would a GPU train with the CPUs that it has? Measures the time of a penstock worker for
a batch of each workload, and writes the profiles that `penstock simulate --profiles` reads.

Only 1 and 2 workers are measured. The curve is computed: CPUs over the seconds of one worker for a
batch, up to the step time of the GPU, which is an argument. These seconds are wall-clock time, from
the rate of one worker with an idle trainer, so that a worker that waits for storage counts.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import MeasurementError, Record, add_report_options, report, summary
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
CLASSES = {"photographs": "image", "text": "language", "audio": "speech"}  # other: the rest
WORKER_COUNTS = (1, 2)
BASE_CPUS = 3  # with which a profile has speed 1, as Synergy's have
CPUS_MAX = 32


def measure(args: argparse.Namespace) -> Iterator[Record]:
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(args.rounds):
        for workload in args.only or WORKLOADS:
            for count in WORKER_COUNTS:
                found = _run(workload, count, turn, args)
                rounds.setdefault((workload, count), []).append(found)
    for (workload, count), found in rounds.items():
        for metric in found[0]:
            yield summary(
                f"worker_curves/{workload}/{metric}",
                {"workload": workload, "workers": count},
                [one[metric] for one in found],
                ndigits=6,
            )


def _run(workload: str, count: int, turn: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(HERE / "measure.py"), workload, "worker_cpu", "penstock"]
    command += ["--out", str(args.data), "--seed", str(turn), "--workers", str(count)]
    command += ["--seconds", str(args.seconds), "--warmup", str(args.warmup)]
    command += ["--quick"] if args.quick else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise MeasurementError(
            f"{workload} with {count} workers exited with code {done.returncode}:\n"
            f"{done.stderr[-2000:]}"
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def profiles(records: Sequence[Record], step_s: float) -> str:
    """The table, with the speeds by CPUs up to where all are flat."""
    of_workload = _figures(records)
    worker_s = {name: 1 / one["batches_per_s"] for name, one in of_workload.items()}
    needed = max(math.ceil(seconds / step_s) for seconds in worker_s.values())
    cpu_count = min(CPUS_MAX, max(BASE_CPUS, needed))
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Workloads of bench/workloads, measured by bench/worker_curves.py on",
        f"# {records[0]['machine']}, commit {records[0]['commit']}.",
        f"# A step of the GPU is assumed to take {step_s:g} s. Speeds: CPUs over the seconds of",
        "# one worker for a batch, up to that. Speed 1 is with 3 CPUs. Milliseconds of a worker:",
        "# " + ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in worker_s.items()) + ".",
        "model,class,iteration_s,batch,sample_bytes,"
        + ",".join(f"cpu{count}" for count in range(1, cpu_count + 1)),
    ]
    for name, one in of_workload.items():
        base_s = max(step_s, worker_s[name] / BASE_CPUS)
        speeds = [base_s / max(step_s, worker_s[name] / count) for count in range(1, cpu_count + 1)]
        samples = round(one["samples_per_batch"])
        lines.append(
            f"{name},{CLASSES.get(name, 'other')},{base_s:.4g},{samples},"
            f"{round(one['bytes_per_batch'] / samples)},"
            + ",".join(f"{speed:.4g}" for speed in speeds)
        )
    return "\n".join(lines) + "\n"


def _figures(records: Sequence[Record]) -> Mapping[str, dict[str, float]]:
    """The medians of each workload, with one worker."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record["parameters"]["workers"] == 1:
            metric = record["name"].rpartition("/")[2]
            found.setdefault(record["parameters"]["workload"], {})[metric] = record["median"]
    return found


def render(records: Sequence[Record]) -> str:
    rows = [
        "| workload | worker CPU ms per batch, 1 worker | 2 workers | batches/s, 1 worker | "
        "2 workers | 2 workers / twice 1 worker |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    values: dict[tuple[str, str, int], Any] = {
        (r["parameters"]["workload"], r["name"].rpartition("/")[2], r["parameters"]["workers"]): r
        for r in records
    }
    for name in dict.fromkeys(r["parameters"]["workload"] for r in records):
        one, two = (values[name, "worker_s", count]["median"] * 1e3 for count in WORKER_COUNTS)
        slow, fast = (values[name, "batches_per_s", count]["median"] for count in WORKER_COUNTS)
        rows.append(
            f"| {name} | {one:.3g} | {two:.3g} | {slow:.3g} | {fast:.3g} | {fast / slow / 2:.2f} |"
        )
    shares = [
        values[name, "worker_s", 2]["median"] / values[name, "worker_s", 1]["median"]
        for name in dict.fromkeys(r["parameters"]["workload"] for r in records)
    ]
    return "\n".join([*rows, "", f"CPU of a batch with 2 workers over 1: {median(shares):.2f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS)
    parser.add_argument("--step-s", type=float, default=0.02, help="GPU seconds per batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="smoke test with little data")
    parser.add_argument("--data", type=Path, default=HERE / "out")
    parser.add_argument("--profiles", type=Path, help="output file for the table of profiles")
    add_report_options(parser)
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    records = report("worker_curves.py", args, measure, render)
    if records is None:
        return 2
    if args.profiles:
        args.profiles.write_text(profiles(records, args.step_s), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
