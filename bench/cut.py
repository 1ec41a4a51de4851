# SPDX-License-Identifier: Apache-2.0
"""Training with one extra worker core: penstock's cut against no cut and against the maximal one.

The trainer has a core and a thread, its one worker has another core. Each kind has a process, and
these train in turns, a quarter of a second at a time, while the others wait: other load on the
machine affects all equally. Ratios are taken within a round. Sessions of fresh processes follow
each other. With --link the workers belong to a pool on the far side of a cable. The first losses of
every process are compared bit for bit before its figures count. With --overhead instead: the cost
of `offload` per step when no operation moves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import select
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cut_table
import shaped_link
from cut_training import KINDS, choose_cores
from cut_workloads import OVERHEAD_MODELS, WORKLOADS
from figures import (
    MeasurementError,
    Record,
    add_report_options,
    median_interval,
    report,
    run_main,
    show_progress,
    summary,
)
from pool_host import PoolError, PoolHost

HERE = Path(__file__).resolve().parent
RATES = ("steps_per_s", "waiting_share", "batch_bytes", "foreign_cores")
PLANS = (
    "moved_calls",
    "raw_bytes",
    "maximal_bytes",
    "boundary_bytes",
    "priced_worker_s",
    "priced_trainer_s",
    "changes",
    "changes_while_timed",
)
# By default: slices of each kind in a session, and processes of --overhead.
ROUNDS, OVERHEAD_ROUNDS = 80, 4
LIMIT_S = 300.0  # of one answer of a process, or of one that gives a single one

Measurement = dict[str, Any]


def _run(script: str, *arguments: str) -> Measurement:
    name = " ".join(arguments[:2])
    command = [sys.executable, str(HERE / script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as err:
        raise MeasurementError(f"{name} took over {LIMIT_S:.0f} s") from err
    if done.returncode != 0:
        raise MeasurementError(f"{name} exited with code {done.returncode}:\n{done.stderr[-2000:]}")
    result: Measurement = json.loads(done.stdout.splitlines()[-1])
    return result


class Training:
    """A process that trains for a while when asked to, and waits otherwise."""

    def __init__(
        self, workload: str, kind: str, *arguments: str, prefix: Sequence[str] = ()
    ) -> None:
        """``prefix`` is a command that runs another command in a separate place."""
        self._name = f"{workload} {kind}"
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "cut_rate.py"), workload, kind, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.start = self._answer()

    def run(self, seconds: float) -> Measurement:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> Measurement:
        """The plan's result: the calls that moved, and the times."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._answer()

    def close(self) -> None:
        """Ends the process if it has not ended."""
        with self._process:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._errors.close()

    def _answer(self) -> Measurement:
        stdout = self._process.stdout
        assert stdout is not None
        is_there, _, _ = select.select([stdout], [], [], LIMIT_S)
        if not is_there:
            raise MeasurementError(f"{self._name} took over {LIMIT_S:.0f} s")
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise MeasurementError(
                f"{self._name} exited with code {code}:\n{self._errors.read()[-2000:]}"
            )
        result: Measurement = json.loads(line)
        return result


@dataclass(frozen=True, slots=True)
class Place:
    """Where trainings run, and where their workers are."""

    name: str = "cut"
    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@contextlib.contextmanager
def across_a_link(rate: str) -> Iterator[Place]:
    """Two network namespaces with a cable of this rate. On the far side a pool has a worker for
    each kind, all on the second core."""
    _, worker_core = choose_cores()
    with tempfile.TemporaryDirectory() as folder, shaped_link.ShapedLink(rate) as link:
        inside = [*link.enter(link.pool_side), "taskset", "-c", str(worker_core)]
        with PoolHost(Path(folder), address=shaped_link.POOL_ADDRESS, prefix=inside) as host:
            host.start_workers(len(KINDS))
            host.wait_for_workers(len(KINDS))
            yield Place(
                f"cut-{rate}",
                tuple(link.enter(link.trainer_side)),
                ("--pool", host.endpoint, "--keys", host.keys),
            )


def measure_workload(workload: str, args: argparse.Namespace, place: Place) -> list[Record]:
    slices: dict[str, list[Measurement]] = {kind: [] for kind in KINDS}
    plans: dict[str, list[Measurement]] = {kind: [] for kind in KINDS if kind != "eager"}
    start: Measurement = {}
    for session in range(args.sessions):
        arguments = ["--warmup", str(args.warmup), "--seed", str(session)]
        arguments += ["--quick"] if args.quick else []
        arguments += place.arguments
        trainings: dict[str, Training] = {}
        try:
            for kind in alternating_kinds(session):
                show_progress(
                    f"{workload}: session {session + 1} of {args.sessions}, starting {kind}"
                )
                trainings[kind] = Training(workload, kind, *arguments, prefix=place.prefix)
            start = trainings["auto"].start
            check_losses(workload, {kind: trainings[kind].start["losses"] for kind in KINDS})
            for round_index in range(args.rounds):
                show_progress(
                    f"{workload}: session {session + 1}, round {round_index + 1} of {args.rounds}"
                )
                for kind in alternating_kinds(round_index):
                    slices[kind].append(trainings[kind].run(args.seconds))
            for kind, measured in plans.items():
                measured.append(trainings[kind].end())
        finally:
            for training in trainings.values():
                training.close()
    parameters = {
        "trainer_threads": 1,
        "num_workers": 1,
        "cores": start["cores"],
        "seconds": args.seconds,
        "sessions": args.sessions,
        "warmup_s": args.warmup,
        "equal_losses": len(start["losses"]),
    }
    return rate_records(f"{place.name}/{workload}", slices, plans, parameters)


def alternating_kinds(round_index: int) -> list[str]:
    """Every kind is at every place, forwards and backwards."""
    start = round_index // 2 % len(KINDS)
    kinds = [*KINDS[start:], *KINDS[:start]]
    return kinds if round_index % 2 == 0 else kinds[::-1]


def check_losses(workload: str, losses: dict[str, list[str]]) -> None:
    for kind in KINDS[1:]:
        for step, (ours, theirs) in enumerate(zip(losses[kind], losses["eager"], strict=True)):
            if ours != theirs:
                raise MeasurementError(
                    f'{workload}: the loss of step {step} has the bytes {ours} with cut="{kind}", '
                    f"but {theirs} without offload; no results are reported"
                )


def rate_records(
    name: str,
    slices: dict[str, list[Measurement]],
    plans: dict[str, list[Measurement]],
    parameters: dict[str, Any],
) -> list[Record]:
    """One record for each kind and metric, and one for each ratio of interest. `slices` has the
    slices of all sessions, and `plans` are by session."""
    result = []
    for kind, measurements in slices.items():
        own: dict[str, Any] = {**parameters, "kind": kind}
        for metric in RATES:
            values = [measurement[metric] for measurement in measurements]
            result.append(summary(f"{name}/{metric}", own, values, ndigits=6))
    for kind, measurements in plans.items():
        moved = Counter(tuple(measurement["moved"]) for measurement in measurements)
        own = {**parameters, "kind": kind}
        own["plans"] = [{"sessions": n, "moved": list(calls)} for calls, n in moved.items()]
        for metric in PLANS:
            values = [measurement[metric] for measurement in measurements]
            result.append(summary(f"{name}/{metric}", own, values, ndigits=6))

    rates = {kind: [m["steps_per_s"] for m in measured] for kind, measured in slices.items()}
    better = max(("none", "maximal"), key=lambda kind: statistics.median(rates[kind]))
    rates["better"] = rates[better]
    ratios = [("auto", over) for over in ("better", "none", "maximal", "eager")]
    for kind, over in [*ratios, ("maximal", "none")]:
        values = [ours / theirs for ours, theirs in zip(rates[kind], rates[over], strict=True)]
        own = {**parameters, "kind": kind, "over": over}
        session_rounds = len(values) // parameters["sessions"]
        own["of_sessions"] = [
            round(statistics.median(values[first : first + session_rounds]), 4)
            for first in range(0, len(values), session_rounds)
        ]
        record = summary(f"{name}/ratio", own, values)
        record["interval"] = median_interval(values)
        result.append(record)
    return result


def measure_overhead(model: str, args: argparse.Namespace) -> list[Record]:
    measured = []
    for round_index in range(args.rounds):
        show_progress(f"overhead/{model}: process {round_index + 1} of {args.rounds}")
        arguments = ("--steps", str(args.steps), "--seed", str(round_index))
        measured.append(_run("cut_overhead.py", model, *arguments))
    differences = [
        [(ours - theirs) * 1e6 for ours, theirs in zip(m["offloaded_s"], m["eager_s"], strict=True)]
        for m in measured
    ]
    name, parameters = f"cut/overhead/{model}", {
        "trainer_threads": 1,
        "num_workers": 1,
        "cores": measured[0]["cores"],
        "graphs": measured[0]["graphs"],
        "rows": [m["rows"] for m in measured],
        "steps_of_a_process": args.steps,
    }  # fmt: skip
    result = []
    for kind in ("eager", "offloaded"):
        values = [value for m in measured for value in m[f"{kind}_s"]]
        result.append(summary(f"{name}/step_s", {**parameters, "kind": kind}, values, ndigits=6))
    values = [m["foreign_cores"] for m in measured]
    result.append(summary(f"{name}/foreign_cores", {**parameters, "kind": "both"}, values))
    pooled = [value for process in differences for value in process]
    own = {**parameters, "kind": "offloaded", "over": "eager"}
    own["of_processes"] = [summary("", {}, process)["median"] for process in differences]
    record = summary(f"{name}/overhead_us", own, pooled)
    record["interval"] = median_interval(pooled)
    result.append(record)
    step_us = result[0]["median"] * 1e6
    percent = summary(f"{name}/overhead_percent", own, [value / step_us * 100 for value in pooled])
    percent["interval"] = [round(value / step_us * 100, 4) for value in record["interval"]]
    return [*result, percent]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cases = f"cases: {', '.join(WORKLOADS)}; with --overhead: {', '.join(OVERHEAD_MODELS)}"
    rounds = f"slices per kind and session (default: {ROUNDS}) or processes ({OVERHEAD_ROUNDS})"
    add("--only", nargs="+", metavar="NAME", default=[], help=cases)
    add("--rounds", type=int, help=rounds)
    add("--sessions", type=int, default=3, help="sessions, each in new processes (default: 3)")
    add("--seconds", type=float, default=0.25, help="timed seconds of a slice (default: 0.25)")
    add(
        "--warmup",
        type=float,
        default=4.0,
        help="seconds of warm-up after the first losses (default: 4)",
    )
    add("--overhead", action="store_true", help="measure the cost of offload without moved calls")
    add("--link", metavar="RATE", help="rate of a simulated cable, such as 1gbit; requires root")
    add(
        "--steps",
        type=int,
        default=1000,
        help="--overhead: steps per side and process (default: 1000)",
    )
    add("--quick", action="store_true", help="smoke test: little data and one short round")
    add_report_options(parser)
    args = parser.parse_args()
    names = OVERHEAD_MODELS if args.overhead else WORKLOADS
    if unknown := [name for name in args.only if name not in names]:
        parser.error(f"--only must be one of {', '.join(names)}, got {unknown[0]}")
    args.only = args.only or list(names)
    if args.rounds is None:
        args.rounds = OVERHEAD_ROUNDS if args.overhead else ROUNDS
    lowest_of = {"rounds": 1, "sessions": 1, "steps": 1, "seconds": 0.1, "warmup": 0}
    for name, lowest in lowest_of.items():
        if not lowest <= getattr(args, name) < 100_000:
            parser.error(f"--{name} must be >= {lowest}, got {getattr(args, name)}")
    if args.quick:
        args.rounds, args.sessions, args.seconds = 1, 1, 0.3
        args.warmup, args.steps = 0.1, 20
    if args.read is None and importlib.util.find_spec("penstock") is None:
        parser.error("penstock cannot be imported here; run `make bench`")
    return args


def main() -> int:
    done = report("cut", parse_arguments(), measure_all, cut_table.render)
    return 2 if done is None else 0


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    if args.overhead:
        for name in args.only:
            yield from measure_overhead(name, args)
    else:
        try:
            with (
                across_a_link(args.link) if args.link else contextlib.nullcontext(Place()) as place
            ):
                for name in args.only:
                    yield from measure_workload(name, args, place)
        except shaped_link.NoLinkError as error:
            raise MeasurementError(f"--link: {error}; run it as root") from error
        except PoolError as error:
            raise MeasurementError(str(error)) from error
    show_progress("")


if __name__ == "__main__":
    run_main(main)
