# SPDX-License-Identifier: Apache-2.0
"""penstock against torch's DataLoader, interleaved in one run: one JSON line per figure, a table.

Every measurement has a fresh process, and the rounds go torch, penstock, limit, then penstock,
torch, limit, and so on, so that other load on the machine affects all equally. Ratios are taken
within a round. Both loaders get the same arguments, num_workers=2 and one thread in the consumer,
an empty loop; before a workload is timed, both streams are compared bit for bit. Workloads name the
options that only penstock has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import table
from figures import (
    MeasurementError,
    Record,
    Rounds,
    bench_parser,
    records,
    report,
    run_main,
    show_progress,
)
from workloads import WORKLOADS, load

HERE = Path(__file__).resolve().parent
WORKER_COUNT = 2
WORKER_COUNTS = {"one_batch": 0, "spawn_start": 8, "forkserver_start": 8, "memory": 4}
# The measurements: the name of a case, its question, and its workload.
CASES = {name: ("rate", name) for name in WORKLOADS} | {
    f"{question}/{name}": (question, name)
    for question in ("first_batch", "next_epoch")
    for name in ("tiny", "photographs")
}
CASES["one_batch/object_store"] = ("one_batch", "object_store")
CASES |= {
    f"{question}/{name}": (question, name)
    for question in ("spawn_start", "forkserver_start")
    for name in ("object_list", "array", "tensor")
}
CASES |= {f"memory/{name}": ("memory", name) for name in ("object_list", "shared_list")}


def _run(
    workload: str, question: str, kind: str, round_index: int, args: argparse.Namespace
) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "measure.py"), workload, question, kind]
    command += ["--out", str(args.data), "--seed", str(round_index)]
    command += ["--seconds", str(args.seconds), "--warmup", str(args.warmup)]
    command += ["--repeats", str(args.repeats), *(["--quick"] if args.quick else [])]
    limit_s = 120 + 20 * (args.seconds + args.warmup)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as err:
        raise MeasurementError(f"{workload} {question} {kind} took over {limit_s:.0f} s") from err
    if done.returncode != 0:
        raise MeasurementError(
            f"{workload} {question} {kind} exited with code {done.returncode}:\n"
            f"{done.stderr[-2000:]}"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_streams(case: str, args: argparse.Namespace) -> None:
    difference = _run(CASES[case][1], "equal", "penstock", 0, args)["difference"]
    if difference is not None:
        raise MeasurementError(f"{case}: the batches differ from torch's, not timed: {difference}")


def measure_case(case: str, args: argparse.Namespace) -> list[Record]:
    question, workload = CASES[case]
    loaders = [kind for kind in ("torch", "penstock") if kind in args.kinds]
    bounds = []
    if question == "rate":
        bounds.append("limit")
        if load(workload).floor_of_sampler:
            bounds.append("sampler")
    elif question == "one_batch":
        bounds.append("limit")
    rounds: Rounds = {kind: [] for kind in loaders + bounds}
    for round_index in range(args.rounds):
        order = loaders if round_index % 2 == 0 else loaders[::-1]
        for kind in order + bounds:
            show_progress(f"{case}: round {round_index + 1} of {args.rounds}, {kind}")
            rounds[kind].append(_run(workload, question, kind, round_index, args))
    parameters: dict[str, Any] = {
        "num_workers": min(WORKER_COUNTS.get(question, WORKER_COUNT), 2 if args.quick else 8),
        "consumer_threads": 1,
        "persistent_workers": question in ("rate", "next_epoch", "memory"),
    }
    if options := load(workload).penstock_options:
        parameters["penstock_options"] = options
    if question == "rate":
        parameters |= {"seconds": args.seconds, "warmup_s": args.warmup}
        parameters["limit"] = load(workload).work_is
    elif question in ("first_batch", "next_epoch", "one_batch"):
        parameters["repeats"] = args.repeats
    return records(f"loader/{case}", question, rounds, parameters)


def parse_arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="CASE", default=[], help=f"one or more of: {', '.join(CASES)}")
    add("--rounds", type=int, default=7, help="measurements per loader")
    add("--seconds", type=float, default=3.0, help="timed seconds of a measurement")
    add("--warmup", type=float, default=3.0, help="seconds of warm-up")
    add("--repeats", type=int, default=10, help="loaders or epochs per measurement of a delay")
    add("--kinds", nargs="+", choices=("torch", "penstock"), default=["torch", "penstock"],
        help="loaders")  # fmt: skip
    add("--quick", action="store_true", help="smoke test: little data and one short round")
    add("--data", type=Path, default=HERE / "out", help="folder for generated data")
    add("--floors", action="store_true", help="exit with code 1 if a floor is missed")
    args = parser.parse_args()
    if unknown := [case for case in args.only if case not in CASES]:
        parser.error(f"--only must be one of {', '.join(CASES)}, got {unknown[0]}")
    for name, lowest in (("rounds", 1), ("repeats", 1), ("seconds", 0.1), ("warmup", 0)):
        if not lowest <= getattr(args, name) < 10_000:
            parser.error(f"--{name} must be >= {lowest}, got {getattr(args, name)}")
    if args.quick:
        args.rounds, args.seconds, args.warmup, args.repeats = 1, 0.5, 0.2, 2
    if "penstock" in args.kinds and args.read is None and not _has_penstock():
        parser.error("penstock cannot be imported here; run `make bench`, or pass --kinds torch")
    return args


def _has_penstock() -> bool:
    return importlib.util.find_spec("penstock") is not None


def main() -> int:
    args = parse_arguments()
    done = report("loader", args, measure_all, lambda found: table.render(table.Figures(found)))
    if done is None:
        return 2
    missed = any(floor.verdict == table.MISSED for floor in table.floors(table.Figures(done)))
    return 1 if args.floors and missed else 0


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    for case in args.only or CASES:
        if set(args.kinds) == {"torch", "penstock"}:
            show_progress(f"{case}: comparing the two streams")
            check_streams(case, args)
        yield from measure_case(case, args)
    show_progress("")


if __name__ == "__main__":
    run_main(main)
