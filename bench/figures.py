# SPDX-License-Identifier: Apache-2.0
"""From the measurements of each round to figures: medians, spread, and the paired ratio to torch;
and the printing of a bench's results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

RESAMPLES = 10_000
# The questions of a case, by the kind of answer: a rate, a delay, or memory.
ANSWERS = {
    "rate": "batches_per_s",
    "first_batch": "latency_s",
    "next_epoch": "latency_s",
    "one_batch": "latency_s",
    "spawn_start": "latency_s",
    "forkserver_start": "latency_s",
    "memory": "growth_bytes",
}
HIGHER_IS_BETTER = ("batches_per_s",)
QUIET_FOREIGN_CORES = 0.2

Record = dict[str, Any]
Rounds = dict[str, list[dict[str, float]]]  # kind -> one measurement for each round


class MeasurementError(Exception):
    """A measurement did not complete, or the compared sides gave different results."""


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the defaults, with the options that `report` takes its `args`
    from."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_report_options(parser)
    return parser


def run_main(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code of `main`, or that of Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """The options that `report` takes its `args` from."""
    add = parser.add_argument
    add("--out", type=Path, help="output file for the JSON lines (default: standard output)")
    add("--markdown", action="store_true", help="print only the tables")
    add("--read", type=Path, metavar="FILE", help="print the tables of a file of JSON lines")


def add_window_options(
    parser: argparse.ArgumentParser, *, rounds: int, seconds: float, warmup: float
) -> None:
    """The options of a bench whose kinds take turns: each has one window in a round."""
    add = parser.add_argument
    add("--rounds", type=int, default=rounds, help="windows per kind")
    add("--seconds", type=float, default=seconds, help="seconds of a window")
    add("--warmup", type=float, default=warmup, help="seconds before a window")


def log(text: str) -> None:
    """A line on the progress of a bench."""
    print(text, file=sys.stderr, flush=True)


def show_progress(text: str) -> None:
    """The progress of a bench: on a terminal, in place of the previous line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        log(text)


def report(
    bench: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Iterable[Record]],
    render: Callable[[list[Record]], str],
) -> list[Record] | None:
    """Measures, or reads the file `args.read`, and prints the text that `render` makes of it.
    Returns the records, or None when a measurement failed, as reported on standard error.

    Each record is written as a line as soon as it is available: to the file `args.out`, or to
    standard output unless `args.markdown`. Records without a line are printed when a measurement
    fails.
    """
    if args.read is not None:
        everything = [json.loads(line) for line in args.read.read_text().splitlines()]
    else:
        everything = []
        try:
            for record in _measured(measure(args), args.out, is_shown=not args.markdown):
                everything.append(record)
        except MeasurementError as err:
            if args.markdown and args.out is None:
                # They took minutes; `--read` makes tables of them.
                for record in everything:
                    put_line(record, None, is_shown=True)
            print(f"\n{bench}: {err}", file=sys.stderr)
            return None
    if everything:
        print(f"commit {everything[0]['commit']}, {everything[0]['machine']}\n")
        print(render(everything))
    busy = [r["median"] for r in everything if r["name"].endswith("/foreign_cores")]
    if busy and max(busy) > QUIET_FOREIGN_CORES:
        print(f"\nOther processes used up to {max(busy):.1f} cores: do not quote these figures.")
    return everything


def _measured(measured: Iterable[Record], out: Path | None, *, is_shown: bool) -> Iterator[Record]:
    """The records, with the commit and the machine that they were measured on."""
    where = {"commit": commit(), "machine": machine()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
    for measurement in measured:
        record = measurement | where
        put_line(record, out, is_shown=is_shown)
        yield record


def records(name: str, question: str, rounds: Rounds, parameters: dict[str, Any]) -> list[Record]:
    """One record for each kind and metric, and one for each ratio to torch, limit or sampler."""
    result = []
    for kind, measurements in rounds.items():
        for metric in measurements[0]:
            values = [measurement[metric] for measurement in measurements]
            result.append(
                summary(f"{name}/{metric}", {**parameters, "kind": kind}, values, ndigits=6)
            )
    main = ANSWERS[question]
    for over in rounds:
        for kind in ("torch", "penstock"):
            if kind in rounds and over != kind and over in ("torch", "limit", "sampler"):
                pairs = zip(rounds[kind], rounds[over], strict=True)
                ratios = [
                    ours[main] / theirs[main]
                    if main in HIGHER_IS_BETTER
                    else theirs[main] / ours[main]
                    for ours, theirs in pairs
                ]
                record = summary(
                    f"{name}/ratio", {**parameters, "kind": kind, "over": over}, ratios
                )
                record["interval"] = median_interval(ratios)
                result.append(record)
    return result


def median_interval(values: Sequence[float]) -> list[float]:
    """The 95% interval of the median by bootstrap over the rounds, from a fixed seed."""
    draw = numpy.random.default_rng(0)
    resampled = draw.choice(numpy.asarray(values), (RESAMPLES, len(values)))
    low, high = numpy.percentile(numpy.median(resampled, axis=1), [2.5, 97.5])
    return [round(float(low), 4), round(float(high), 4)]


def summary(
    name: str, parameters: dict[str, Any], values: Sequence[float], ndigits: int = 4
) -> Record:
    """One record: the median, and the spread."""
    p10, median, p90 = (float(value) for value in numpy.percentile(values, [10, 50, 90]))
    return {
        "name": name,
        "parameters": parameters,
        "median": round(median, ndigits),
        "p10": round(p10, ndigits),
        "p90": round(p90, ndigits),
        "n": len(values),
    }


def commit() -> str:
    """The measured commit, marked when the tree differs from it."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


def machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    core_count = len(os.sched_getaffinity(0))
    return (
        f"{core_count} x {model}, {memory_gib:.0f} GiB, Linux {os.uname().release}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def put_line(record: Record, out: Path | None, *, is_shown: bool) -> None:
    """Adds the record as one JSON line to the file, or without one prints it if it is to be
    shown."""
    line = json.dumps(record)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
    elif is_shown:
        print(line, flush=True)
