# SPDX-License-Identifier: Apache-2.0
"""The executor of prefixes against eager torch, TorchScript and, on demand, AOTInductor.

All run the same prefix, everything that can move of a model, on the same batch, with one thread and
without autograd. A round is a separate process, in which they take turns by the call, in random
order; ratios are taken within a call's turn. Results of the executor are compared bit for bit with
eager's before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from figures import (
    MeasurementError,
    Record,
    add_report_options,
    log,
    median_interval,
    report,
    run_main,
    summary,
)

HERE = Path(__file__).resolve().parent
LIMIT_S = 600.0  # of one process; AOTInductor compiles C++

Measurement = dict[str, Any]


def run_rate(*arguments: str) -> Any:
    command = [sys.executable, str(HERE / "executor_rate.py"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as err:
        raise MeasurementError(f"{arguments[0]} took over {LIMIT_S:.0f} s") from err
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or ["no output"]
        raise MeasurementError(f"{arguments[0]}: {reason[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_case(case: str, args: argparse.Namespace) -> list[Record]:
    arguments = ["--seconds", str(args.seconds), "--warmup", str(args.warmup)]
    arguments += ["--calls", str(args.calls), "--malloc", args.malloc]
    arguments += [
        *(["--zoo"] if args.zoo else []),
        *(["--aotinductor"] if args.aotinductor else []),
    ]
    rounds: list[Measurement] = []
    for index in range(args.rounds):
        log(f"{case}: round {index + 1} of {args.rounds}")
        rounds.append(run_rate(case, *arguments, "--seed", str(index)))
    parameters = {
        "threads": 1,
        "malloc": args.malloc,
        "nodes": rounds[0]["nodes"],
        "saved_nodes": rounds[0]["saved_nodes"],
        "output_bytes": rounds[0]["output_bytes"],
        "calls": sum(len(r["times_us"]["eager"]) for r in rounds),
        "equal": rounds[0]["equal"],
    }
    return case_records(f"executor/{case}", rounds, parameters)


def case_records(name: str, rounds: list[Measurement], parameters: dict[str, Any]) -> list[Record]:
    """For each kind its time and page faults, and eager's time over it."""
    result = []
    for kind in rounds[0]["times_us"]:
        own = {**parameters, "kind": kind}
        times = [time for r in rounds for time in r["times_us"][kind]]
        result.append(summary(f"{name}/batch_us", own, times))
        result.append(summary(f"{name}/faults", own, [r["faults"][kind] for r in rounds]))
        if kind != "eager":
            ratios = [
                eager / ours
                for r in rounds
                for eager, ours in zip(r["times_us"]["eager"], r["times_us"][kind], strict=True)
            ]
            record = summary(f"{name}/ratio", {**own, "over": "eager"}, ratios)
            record["interval"] = median_interval(ratios)
            record["of_rounds"] = [
                round(
                    statistics.median(r["times_us"]["eager"])
                    / statistics.median(r["times_us"][kind]),
                    4,
                )
                for r in rounds
            ]
            result.append(record)
    if "aotinductor" in rounds[0]["times_us"]:
        own = {**parameters, "kind": "aotinductor"}
        result.append(summary(f"{name}/build_s", own, [r["build_s"] for r in rounds]))
    busy = [r["foreign_cores"] for r in rounds]
    result.append(summary(f"{name}/foreign_cores", {**parameters, "kind": "all"}, busy))
    return result


def table(everything: list[Record]) -> str:
    """Microseconds for a batch, and how many times as fast as eager."""
    by_case: dict[str, dict[str, dict[str, Record]]] = {}
    for record in everything:
        _, case, metric = record["name"].split("/")
        by_case.setdefault(case, {}).setdefault(record["parameters"]["kind"], {})[metric] = record
    kinds = list(dict.fromkeys(k for case in by_case.values() for k in case if k != "all"))
    lines = [
        "| case | calls saved of | " + " | ".join(f"{kind}, us" for kind in kinds)
        + " | " + " | ".join(f"{kind}: x eager" for kind in kinds[1:])
        + " | faults: " + ", ".join(kinds) + " | other bits | foreign cores |"
    ]  # fmt: skip
    lines.append("|" + " --- |" * (lines[0].count("|") - 1))
    for case, metrics in by_case.items():
        parameters = metrics["eager"]["batch_us"]["parameters"]
        cells = [f"`{case}`", f"{parameters['saved_nodes']} of {parameters['nodes']}"]
        for kind in kinds:
            time = metrics[kind]["batch_us"]
            cells.append(f"{time['median']:,.1f} ({time['p10']:,.1f}..{time['p90']:,.1f})")
        for kind in kinds[1:]:
            low, high = metrics[kind]["ratio"]["interval"]
            cells.append(f"{metrics[kind]['ratio']['median']:.2f} ({low:.2f}..{high:.2f})")
        cells.append(", ".join(f"{metrics[kind]['faults']['median']:.1f}" for kind in kinds))
        cells.append(", ".join(k for k, same in parameters["equal"].items() if not same) or "none")
        cells.append(f"{metrics['all']['foreign_cores']['median']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="cases to measure; --list shows all")
    add("--list", action="store_true", help="only print the names of the cases")
    add("--zoo", action="store_true", help="models of tests/zoo that are a single graph")
    add("--rounds", type=int, default=5, help="processes per case (default: 5)")
    add("--seconds", type=float, default=3.0, help="timed seconds of a process (default: 3)")
    add("--warmup", type=float, default=1.0, help="seconds of warm-up (default: 1)")
    add("--calls", type=int, default=20, help="minimum calls per kind and process (default: 20)")
    add(
        "--malloc", choices=("worker", "default"), default="worker",
        help="glibc's malloc thresholds: those of a worker or glibc's (default: worker)",
    )  # fmt: skip
    add(
        "--aotinductor",
        action="store_true",
        help="also measure AOTInductor, which compiles for seconds",
    )
    add("--quick", action="store_true", help="smoke test: one short round")
    add_report_options(parser)
    args = parser.parse_args()
    for name, lowest in (("rounds", 1), ("seconds", 0.01), ("warmup", 0), ("calls", 1)):
        if not lowest <= getattr(args, name) < 100_000:
            parser.error(f"--{name} must be >= {lowest}, got {getattr(args, name)}")
    if args.quick:
        args.rounds, args.seconds, args.warmup, args.calls = 1, 0.1, 0.05, 3
    if args.read is None and importlib.util.find_spec("penstock") is None:
        parser.error("penstock cannot be imported here; run `make bench`")
    return args


def measure_all(args: argparse.Namespace) -> Iterable[Record]:
    names = run_rate("--list", *(["--zoo"] if args.zoo else []))
    if args.list:
        print("\n".join(names))
        return ()
    if unknown := [name for name in args.only or [] if name not in names]:
        raise MeasurementError(f"--only must be one of {', '.join(names)}, got {unknown[0]}")
    return measure_cases(args.only or names, args)


def measure_cases(names: list[str], args: argparse.Namespace) -> Iterator[Record]:
    for name in names:
        try:
            yield from measure_case(name, args)
        except MeasurementError as err:
            # In the zoo, some models are not one graph, have no movable operation, or are not
            # installed.
            if not args.zoo or "other bits" in str(err):
                raise
            log(f"skipped: {err}")


def main() -> int:
    done = report("executor", parse_arguments(), measure_all, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
