# SPDX-License-Identifier: Apache-2.0
"""The start-up time of penstock commands, and their peak of resident memory.

Each start is a separate process; the commands take turns, and with several ``--python`` so do the
Pythons, each with a separate penstock installation: that is how two commits are compared. Python
alone and an import of torch are measured for comparison: no program can start faster than the
first, and no program that needs torch faster than the second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import process_tree
from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned, number, spread

HERE = Path(__file__).resolve().parent
LIMIT_S = 300.0
LISTENS = "listens at tcp://"


class Case(NamedTuple):
    arguments: str  # of Python; {folder} is an empty one, {controller} the address of a live one
    # The text that it prints when it has started; without one, the start ends with the command.
    ready: str = ""
    codes: tuple[int, ...] = (0,)


CASES = {
    "python": Case("-c pass"),
    "import_torch": Case("-c import\ttorch"),
    "import_penstock": Case("-c import\tpenstock"),
    "dataloader": Case("-c from\tpenstock\timport\tDataLoader"),
    "offload": Case("-c from\tpenstock\timport\toffload"),
    "version": Case("-m penstock --version"),
    "help": Case("-m penstock --help"),
    "typo": Case("-m penstock statsu", codes=(2,)),
    "keys": Case("-m penstock keys {folder}/keys"),
    "status": Case("-m penstock status --controller {controller}"),
    "drain": Case("-m penstock drain 0 --controller {controller}", codes=(1,)),  # it has no worker
    "controller": Case("-m penstock controller --bind tcp://127.0.0.1:0", ready=LISTENS),
    # Until its process accepts connections, which imports torch; the memory is the parent's.
    "worker": Case("-m penstock worker --controller {controller}", ready=LISTENS),
}


@contextlib.contextmanager
def controller(python: str, environment: dict[str, str]) -> Iterator[str]:
    """A controller's address."""
    process = subprocess.Popen(
        [python, "-m", "penstock", "controller", "--bind", "tcp://127.0.0.1:0"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if LISTENS not in line:
                raise MeasurementError(f"the controller of {python} did not start")
            yield line.split("listens at ")[1].split(",")[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)


def start(python: str, case: Case, address: str, environment: dict[str, str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        parts = case.arguments.format(folder=folder, controller=address).split(" ")
        arguments = [part.replace("\t", " ") for part in parts]
        once = [sys.executable, "-I", "-S", str(HERE / "start_once.py"), case.ready]
        done = subprocess.run(
            [*once, python, *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    if done.returncode == 0:
        measured: dict[str, float] = json.loads(done.stdout)
        if measured.pop("code") in case.codes:
            return measured
    output_lines = done.stderr.strip().splitlines() or ["no output"]
    raise MeasurementError(f"{python} {' '.join(arguments)}: {output_lines[-1]}")


def measure(args: argparse.Namespace) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}  # with separate keys
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
            environment.pop(name, None)
        addresses = {
            python: stack.enter_context(controller(python, environment)) for python in args.python
        }
        seen: dict[tuple[str, str], list[dict[str, float]]] = {}
        for turn in range(args.rounds + 1):  # the first brings the files into memory
            print(f"round {turn} of {args.rounds}", file=sys.stderr, flush=True)
            if turn == 1:
                seen.clear()
                begin, busy_s, used_s = time.perf_counter(), process_tree.machine_busy_s(), own_s()
            for name in args.only or CASES:
                for python in args.python:
                    measured = start(python, CASES[name], addresses[python], environment)
                    seen.setdefault((name, python), []).append(measured)
        others_s = process_tree.machine_busy_s() - busy_s - (own_s() - used_s)
        foreign_cores = max(0.0, others_s / (time.perf_counter() - begin))
    for (name, python), measurements in seen.items():
        record = summary(
            f"start/{name}/start_s", {"python": python}, [each["seconds"] for each in measurements]
        )
        record["peak_rss_bytes"] = max(int(each["peak_rss_bytes"]) for each in measurements)
        yield record
    yield summary("start/foreign_cores", {"python": "all"}, [foreign_cores])


def own_s() -> float:
    """CPU time of the starts; the controllers, which wait, use almost none."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def table(everything: list[Record]) -> str:
    """Milliseconds and MB of each command, a column for each Python."""
    starts = [record for record in everything if "peak_rss_bytes" in record]
    pythons = list(dict.fromkeys(record["parameters"]["python"] for record in starts))
    heads = ["command"]
    for index, _ in enumerate(pythons):
        mark = f" [{index + 1}]" if len(pythons) > 1 else ""
        heads += [f"start, ms{mark}", f"peak RSS, MB{mark}"]
    rows = [heads]
    for name in dict.fromkeys(record["name"] for record in starts):
        row = [f"`{name.split('/')[1]}`"]
        for python in pythons:
            (found,) = (
                record
                for record in starts
                if (record["name"], record["parameters"]["python"]) == (name, python)
            )
            row += [spread(found, 1e3), number(found["peak_rss_bytes"] / 1e6)]
        rows.append(row)
    notes = [f"[{index + 1}] {python}" for index, python in enumerate(pythons)]
    return "\n".join([aligned(rows), *(notes if len(pythons) > 1 else [])])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help=f"one or more of: {', '.join(CASES)}")
    add(
        "--python", nargs="+", metavar="PATH", default=[sys.executable],
        help="Pythons with penstock installed, to compare (default: this one)",
    )  # fmt: skip
    add("--rounds", type=int, default=15, help="timed starts per case (default: 15)")
    add("--quick", action="store_true", help="smoke test: one round")
    add_report_options(parser)
    args = parser.parse_args()
    if unknown := [name for name in args.only or [] if name not in CASES]:
        parser.error(f"--only must be one of {', '.join(CASES)}, got {unknown[0]}")
    if not 1 <= args.rounds < 10_000:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    if args.quick:
        args.rounds = 1
    # A start has a private folder. Links are kept: the link of a virtual environment shows which it
    # is.
    args.python = [os.path.abspath(python) for python in args.python]
    return args


def main() -> int:
    done = report("start", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
