# SPDX-License-Identifier: Apache-2.0
"""How close the advice of `penstock doctor` is to the best of a full search.

Each workload of bench/loader.py starts with one worker, one thread and one batch ahead. A search
times every set of options of a grid, in a newly drawn order. The doctor runs the same program, with
at most 5 trials. Then the fastest of the grid and the doctor's advice are timed in turn, each time
in a separate process, and the ratio of a round is used: the fastest of many measurements is also
the luckiest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import MeasurementError, Record, bench_parser, log, report, run_main, summary
from table import aligned, number
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
WORKERS, THREADS, FACTORS = (1, 2, 3, 4), (1, 16, 64), (1, 2, 4)
STREAMS = ("tabular",)  # iterable datasets, which have no fetch_threads
ONES = {"num_workers": 1, "fetch_threads": 1, "prefetch_factor": 1}
TRIALS_MAX = 5
Options = dict[str, int]


def grid(workload: str, quick: bool) -> list[Options]:
    threads = (1,) if workload in STREAMS else THREADS
    workers, factors = ((1, 2), (1, 2)) if quick else (WORKERS, FACTORS)
    threads = threads[:1] if quick else threads
    return [
        {"num_workers": w, "fetch_threads": t, "prefetch_factor": f}
        for w, t, f in itertools.product(workers, threads, factors)
    ]


def timed(workload: str, options: list[Options], args: argparse.Namespace) -> list[float]:
    """Batches a second with each set of options, one process for all."""
    command = [sys.executable, str(HERE / "doctor_grid.py"), workload, "--data", str(args.data)]
    command += ["--warmup", str(args.warmup), "--seconds", str(args.seconds)]
    command += ["--options", json.dumps(options), *(["--quick"] if args.quick else [])]
    done = _run(command, f"{workload}: timing", 120 + 60 * len(options))
    lines = [json.loads(line) for line in done.splitlines()]
    return [float(line["batches_per_s"]) for line in lines]


def searched(workload: str, args: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    options = grid(workload, args.quick)
    draw.shuffle(options)
    began_at = time.monotonic()
    rates = timed(workload, options, args)
    best = max(range(len(options)), key=rates.__getitem__)
    ones = rates[options.index(ONES)]
    return {
        "best": options[best],
        "best_batches_per_s": rates[best],
        "ones_batches_per_s": ones,
        "searched": len(options),
        "search_s": time.monotonic() - began_at,
    }


def advised(workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """The doctor's output."""
    command = [sys.executable, "-m", "penstock", "doctor", "--json"]
    command += ["--trials", str(TRIALS_MAX)]
    # The order of a stream depends on the number of its workers.
    command += ["--allow-reordering"] if workload in STREAMS else []
    command += [str(HERE / "doctor_program.py"), workload, "--data", str(args.data)]
    command += ["--quick"] if args.quick else []
    began_at = time.monotonic()
    found = json.loads(_run(command, f"{workload}: the doctor", 1200))
    best = {name: found["best"][name] for name in ONES}
    if not found["best"]["in_order"]:
        raise MeasurementError(f"{workload}: the advice has in_order=False, which the grid lacks")
    return {
        "advice": best,
        "limit": found["limit"],
        "trials": len(found["trials"]),
        "doctor_s": time.monotonic() - began_at,
    }


def measure_workload(workload: str, args: argparse.Namespace) -> Record:
    draw = random.Random(0)
    log(f"{workload}: the full search")
    facts = searched(workload, args, draw)
    log(f"{workload}: the doctor")
    facts |= advised(workload, args)
    ratios, rates = [], []
    pair = [facts["best"], facts["advice"]]
    for round_index in range(args.rounds):
        log(f"{workload}: round {round_index + 1} of {args.rounds}")
        if pair[0] == pair[1]:
            rates.append(timed(workload, [pair[1]], args)[0])
            ratios.append(1.0)
            continue
        order = [0, 1] if round_index % 2 == 0 else [1, 0]
        found = {place: timed(workload, [pair[place]], args)[0] for place in order}
        ratios.append(found[1] / found[0])
        rates.append(found[1])
    facts["advice_batches_per_s"] = statistics.median(rates)
    parameters = {"seconds": args.seconds, "warmup_s": args.warmup, **facts}
    return summary(f"doctor/{workload}/ratio", parameters, ratios)


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    for workload in args.only or WORKLOADS:
        yield measure_workload(workload, args)
    log("")


def render(found: list[Record]) -> str:
    head = ["workload", "all ones", "best of the search", "advice", "trials", "limit", "ratio"]
    rows = []
    for record in found:
        facts = record["parameters"]
        rows.append(
            [
                f"`{record['name'].split('/')[1]}`",
                f"{number(facts['ones_batches_per_s'])}/s",
                f"{_format(facts['best'])}: {number(facts['best_batches_per_s'])}/s",
                f"{_format(facts['advice'])}: {number(facts['advice_batches_per_s'])}/s",
                str(facts["trials"]),
                facts["limit"],
                f"{record['median']:.2f} ({record['p10']:.2f} to {record['p90']:.2f})",
            ]
        )
    return aligned([head, *rows])


def _format(options: Options) -> str:
    return "/".join(str(options[name]) for name in ONES)


def _run(command: list[str], what: str, limit_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"{what} took over {limit_s:.0f} s") from error
    if done.returncode != 0:
        raise MeasurementError(f"{what} exited with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        metavar="WORKLOAD",
        default=[],
        help=f"one or more of: {', '.join(WORKLOADS)}",
    )
    add("--rounds", type=int, default=5, help="comparisons of advice and search")
    add("--seconds", type=float, default=1.5, help="timed seconds of a measurement")
    add("--warmup", type=float, default=0.5, help="seconds of warm-up")
    add("--quick", action="store_true", help="smoke test: little data and one short round")
    add("--data", type=Path, default=HERE / "out", help="folder for generated data")
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in WORKLOADS]:
        parser.error(f"--only must be one of {', '.join(WORKLOADS)}, got {unknown[0]}")
    if args.quick:
        args.rounds, args.seconds, args.warmup = 1, 0.2, 0.1
    return 2 if report("doctor", args, measure_all, render) is None else 0


if __name__ == "__main__":
    run_main(main)
