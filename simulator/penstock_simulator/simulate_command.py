# SPDX-License-Identifier: Apache-2.0
"""The command ``penstock simulate``: completion times of a cluster's jobs under several policies
for sharing its CPUs, with a table of the figures, and each policy compared with the first one."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from penstock.cli.command_parser import (
    CommandParser,
    did_you_mean,
    integer,
    one_of,
    run_subcommand,
    seconds,
)
from penstock_simulator import _simulator

DURATION_MIN_S = 60.0
INTERVAL_S = 60.0
SYNTHETIC_JOBS = 500
SYNTHETIC_LOAD = 1.0
_GPUS_MAX = 4096
_SEEDS_MAX = 1000
_FILE_BYTES_MAX = 1 << 28
_BYTES_PER_GBIT = 1e9 / 8
_SHIPPED_PROFILES = ("synergy", "measured")
_WINDOWS_MAX = 100
# Names of the figures in a report.
FIGURES = (
    "completion_mean_s",
    "completion_median_s",
    "completion_p99_s",
    "waiting_mean_s",
    "running_mean_s",
    "makespan_s",
    "gpu_allocated_share",
    "gpu_busy_share",
    "cpu_used_share",
    "operations_per_job_minute",
    "moved_bytes",
)

Runs = Mapping[str, Sequence[_simulator.SimulationReport]]  # by policy, then by window and seed

_HEADER = (
    "policy",
    "mean h",
    "median h",
    "p99 h",
    "waiting h",
    "running h",
    "makespan d",
    "GPUs held",
    "busy",
    "CPUs used",
    "ops/job-min",
    "TB moved",
)


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code. Raises CommandError for arguments that it does not
    accept."""
    return run_subcommand({command: _simulate_command}, command, arguments)


def _simulate_command(arguments: Sequence[str]) -> int:
    args = _parser().parse(arguments)
    _check(args)
    trace = None if args.jobs is None else _read(args.jobs)
    windows = [_jobs(args, trace, window) for window in range(args.windows)]
    runs = _simulate(args, windows, _profiles(args.profiles))
    print(json.dumps(_fields(args, runs), indent=2) if args.json else _text(args, runs))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "simulate",
        "simulate [--jobs FILE] [OPTION ...]",
        """\
Simulates the jobs of a cluster under several policies for sharing its CPUs, and prints their
completion times. Each policy runs the same jobs, once for each seed; a seed decides the model of
each job. `penstock` runs the code of a pool's policy. `tuned` shares CPUs within a server as
Synergy does. With `tf-data-service`, `cachew` and `ray-data`, all jobs share one pool, and each
takes as many CPUs as that system's rule assigns. `infinite` is the upper bound. The rules of other
systems are penstock's interpretation of them.""",
        """\
examples:
  penstock simulate
  penstock simulate --jobs jobs.csv --vc research --first 3000 --split 60/30/10 --seeds 5
  penstock simulate --servers 16x4 --cpus-per-gpu 11 --order srtf --json > figures.json""",
    )
    add = parser.add_argument
    add(
        "--jobs",
        metavar="FILE",
        help="CSV file of the jobs to simulate, with the columns "
        f"submit_s,duration_s,num_gpus,vc[,model] (default: {SYNTHETIC_JOBS} synthetic jobs)",
    )
    add("--vc", metavar="NAME", default="", help="virtual cluster whose jobs are taken from FILE")
    add(
        "--first",
        type=integer(1, 1_000_000),
        metavar="N",
        help=f"number of jobs: the first ones of at least {DURATION_MIN_S:g} s for which the "
        "cluster has enough GPUs (default: all)",
    )
    add(
        "--windows",
        type=integer(1, _WINDOWS_MAX),
        default=1,
        metavar="N",
        help="number of windows of the trace, each with the next --first jobs; intervals are then "
        "over windows (default: 1)",
    )
    add(
        "--profiles",
        metavar="FILE",
        default="synergy",
        help="speed of models by CPUs: a CSV file with the columns "
        "model,class,iteration_s,batch,sample_bytes,cpu1,cpu2,..., or a table that penstock "
        "includes: synergy, twelve models of Synergy, or measured, workloads of penstock's "
        "benchmarks (default: synergy)",
    )
    add(
        "--servers",
        type=_servers,
        default=(8, 8),
        metavar="SERVERSxGPUS",
        help="number of servers and of GPUs per server (default: 8x8)",
    )
    add(
        "--cpus-per-gpu",
        type=integer(1, 1024),
        default=3,
        metavar="N",
        help="number of CPUs per GPU (default: 3)",
    )
    add(
        "--order",
        type=one_of(("fifo", "srtf")),
        default="fifo",
        metavar="ORDER",
        help="order in which jobs get GPUs: fifo, or srtf, shortest remaining time first "
        "(default: fifo)",
    )
    add(
        "--preempt",
        action="store_true",
        help="srtf: preempt running jobs for shorter ones, at a cost of 60 s of work each time",
    )
    add(
        "--split",
        type=_split,
        default=(20.0, 70.0, 10.0),
        metavar="I/L/S",
        help="shares of image, language and speech models (default: 20/70/10)",
    )
    add(
        "--policies",
        type=_policies,
        default=list(_simulator.CPU_POLICIES),
        metavar="NAME,...",
        help="policies to simulate; each is compared with the first (default: "
        f"{','.join(_simulator.CPU_POLICIES)})",
    )
    add(
        "--seeds",
        type=integer(1, _SEEDS_MAX),
        default=5,
        metavar="N",
        help="number of seeds, starting at 0 (default: 5)",
    )
    add(
        "--delay",
        type=seconds(0),
        default=5.0,
        metavar="SECONDS",
        help="time from the assignment of a worker to a job until it works (default: 5)",
    )
    add(
        "--link",
        type=_number(0.001, 1e6),
        default=10.0,
        metavar="GBIT",
        help="inbound network bandwidth of each server in Gbit/s (default: 10)",
    )
    add(
        "--noise",
        type=_number(0, 10),
        default=0.1,
        metavar="SHARE",
        help="standard deviation of the logarithm of measured values (default: 0.1)",
    )
    add(
        "--move-cost",
        type=seconds(0),
        default=_simulator.POOL_MOVE_COST_S,
        metavar="SECONDS",
        help="time that penstock's policy assumes a moved worker to lose (default: "
        f"{_simulator.POOL_MOVE_COST_S:g}, as in a pool)",
    )
    add(
        "--horizon",
        type=seconds(1),
        default=_simulator.POOL_HORIZON_S,
        metavar="SECONDS",
        help="time over which penstock's policy counts the gain of a move (default: "
        f"{_simulator.POOL_HORIZON_S:g}, as in a pool)",
    )
    add(
        "--floor",
        type=_number(0, 1),
        default=_simulator.POOL_FLOOR_SHARE,
        metavar="SHARE",
        help="fraction of an even share of the CPUs that penstock's policy leaves to each GPU "
        f"that can use it (default: {_simulator.POOL_FLOOR_SHARE:g}, as in a pool)",
    )
    add("--json", action="store_true", help="print all figures of each run as JSON")
    return parser


def _check(args: argparse.Namespace) -> None:
    if args.preempt and args.order != "srtf":
        raise ValueError(
            f"--preempt requires --order srtf, got --order {args.order}; it stops running jobs "
            "for shorter ones"
        )
    if args.windows > 1 and (args.jobs is None or args.first is None):
        raise ValueError(
            f"--windows {args.windows} requires --jobs FILE and --first N, the number of jobs in "
            "a window"
        )


def _jobs(args: argparse.Namespace, trace: str | None, window: int) -> _simulator.JobTable:
    gpu_count = math.prod(args.servers)
    if trace is None:
        if args.vc:
            raise ValueError(f"--vc {args.vc!r} requires a file of jobs; name one with --jobs FILE")
        return _simulator.JobTable.synthetic(
            job_count=args.first or SYNTHETIC_JOBS,
            gpu_count=gpu_count,
            load=SYNTHETIC_LOAD,
            seed=0,
        )
    return _simulator.JobTable.parse(
        args.jobs,
        trace,
        vc=args.vc,
        duration_min_s=DURATION_MIN_S,
        gpus_max=gpu_count,
        job_skip_count=window * (args.first or 0),
        job_count_max=args.first or 0,
    )


def _profiles(table: str) -> _simulator.ProfileTable:
    if table not in _SHIPPED_PROFILES:
        return _simulator.ProfileTable.parse(table, _read(table))
    name = f"{table}_profiles.csv"
    shipped = files("penstock_simulator") / name
    return _simulator.ProfileTable.parse(name, shipped.read_text(encoding="utf-8"))


def _read(file: str) -> str:
    path = Path(file)
    size = path.stat().st_size
    if size > _FILE_BYTES_MAX:
        raise ValueError(
            f"{file} must have at most {_FILE_BYTES_MAX} bytes, got {size}; shorten it"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(f"{file} is not valid UTF-8 ({err}); save it as UTF-8") from err


def _simulate(
    args: argparse.Namespace,
    windows: Sequence[_simulator.JobTable],
    profiles: _simulator.ProfileTable,
) -> Runs:
    servers, gpus = args.servers
    return {
        policy: [
            _simulator.simulate(
                jobs,
                profiles,
                server_count=servers,
                gpus_per_server=gpus,
                cpus_per_gpu=args.cpus_per_gpu,
                link_bytes_per_s=args.link * _BYTES_PER_GBIT,
                split=args.split,
                order=args.order,
                preempts=args.preempt,
                policy=policy,
                start_delay_s=args.delay,
                move_cost_s=args.move_cost,
                interval_s=INTERVAL_S,
                horizon_s=args.horizon,
                floor_share=args.floor,
                noise=args.noise,
                seed=seed,
            )
            for jobs in windows
            for seed in range(args.seeds)
        ]
        for policy in args.policies
    }


def _text(args: argparse.Namespace, runs: Runs) -> str:
    servers, gpus = args.servers
    source = f"the jobs of {args.jobs}" + (f", VC {args.vc}" if args.vc else "")
    if args.jobs is None:
        source = "synthetic jobs, since no --jobs was given"
    split = "/".join(f"{share:g}" for share in args.split)
    windows = f"{args.windows} windows of {args.first} jobs, " if args.windows > 1 else ""
    order = f"{args.order}{' with preemption' if args.preempt else ''}"
    return (
        f"{source}; {servers} servers of {gpus} GPUs, {args.cpus_per_gpu} CPUs per GPU, {order}, "
        f"split {split} of image/language/speech, {windows}{args.seeds} seeds\n"
        "\n"
        f"{table(runs, args.windows)}"
    )


def _fields(args: argparse.Namespace, runs: Runs) -> dict[str, object]:
    options = {name: value for name, value in vars(args).items() if name != "json"}
    return {
        "options": options,
        "is_synthetic": args.jobs is None,
        "policies": {
            policy: {
                "runs": [
                    {"window": index // args.seeds, "seed": index % args.seeds}
                    | {name: getattr(run, name) for name in FIGURES}
                    for index, run in enumerate(reports)
                ],
                "speedup_over_first": comparison(runs, policy, args.windows)._asdict(),
            }
            for policy, reports in runs.items()
        },
    }


def _servers(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found and int(found[1]) * int(found[2]) <= _GPUS_MAX:
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(
        f"must be SERVERSxGPUS, such as 8x8, with at most {_GPUS_MAX} GPUs in total, got {text!r}"
    )


def _split(text: str) -> tuple[float, float, float]:
    found = re.fullmatch(
        r"(\d{1,6}(?:\.\d{1,6})?)/(\d{1,6}(?:\.\d{1,6})?)/(\d{1,6}(?:\.\d{1,6})?)", text
    )
    if found and any(float(share) > 0 for share in found.groups()):
        return float(found[1]), float(found[2]), float(found[3])
    raise argparse.ArgumentTypeError(
        f"must be shares of image/language/speech, such as 20/70/10, got {text!r}"
    )


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _simulator.CPU_POLICIES:
            meant = did_you_mean(name, _simulator.CPU_POLICIES)
            there_are = f"; policies are {', '.join(_simulator.CPU_POLICIES)}"
            raise argparse.ArgumentTypeError(
                f"contains the unknown policy {name!r}{meant or there_are}"
            )
    return list(dict.fromkeys(names))


def _number(least: float, most: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if least <= number <= most:
            return number
        raise argparse.ArgumentTypeError(
            f"must be a number from {least:g} to {most:g}, got {text!r}"
        )

    return convert


class Comparison(NamedTuple):
    """A policy's mean completion time compared with the first policy's: the speedup over windows
    and seeds, and the seconds of the gain, by cause."""

    mean: float
    least: float
    most: float
    interval_low: float | None
    interval_high: float | None
    waiting_gain_s: float
    running_gain_s: float


def comparison(runs: Runs, policy: str, window_count: int = 1) -> Comparison:
    """Compare a policy with the first one, run by run.

    The interval is over the runs of one window, or over the means of several windows, since the
    runs of a window share their jobs.
    """
    others, own = runs[next(iter(runs))], runs[policy]
    speedup = _simulator.paired_speedup(_means_s(others, len(others)), _means_s(own, len(own)))
    by_window = speedup
    if window_count > 1:
        by_window = _simulator.paired_speedup(
            _means_s(others, window_count), _means_s(own, window_count)
        )
    gains = [_simulator.gain_parts(other, mine) for other, mine in zip(others, own, strict=True)]
    return Comparison(
        speedup.mean,
        speedup.least,
        speedup.most,
        by_window.interval_low,
        by_window.interval_high,
        fmean(waiting for waiting, _ in gains),
        fmean(running for _, running in gains),
    )


def _means_s(reports: Sequence[_simulator.SimulationReport], group_count: int) -> list[float]:
    """Return the mean completion times of ``group_count`` groups of consecutive runs."""
    size = len(reports) // group_count
    return [
        fmean(run.completion_mean_s for run in reports[first : first + size])
        for first in range(0, len(reports), size)
    ]


def table(runs: Runs, window_count: int = 1) -> str:
    """Return the means over windows and seeds, then the comparisons."""
    rows = [_HEADER, *(_row(policy, reports) for policy, reports in runs.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    first, *others = runs
    sentences = [_sentence(runs, policy, first, window_count) for policy in others]
    return "\n".join([*lines, "", *sentences]).rstrip()


def _row(policy: str, reports: Sequence[_simulator.SimulationReport]) -> tuple[str, ...]:
    mean = {name: fmean(getattr(report, name) for report in reports) for name in FIGURES}
    return (
        policy,
        *(f"{mean[name] / 3600:.2f}" for name in FIGURES[:5]),
        f"{mean['makespan_s'] / 86400:.1f}",
        f"{mean['gpu_allocated_share']:.2f}",
        f"{mean['gpu_busy_share']:.2f}",
        "-" if policy == "infinite" else f"{mean['cpu_used_share']:.2f}",
        f"{mean['operations_per_job_minute']:.3f}",
        f"{mean['moved_bytes'] / 1e12:.1f}",
    )


def _sentence(runs: Runs, policy: str, first: str, window_count: int) -> str:
    it = comparison(runs, policy, window_count)
    interval = ""
    if it.interval_low is not None:
        interval = f", 95 % interval {it.interval_low:.2f} to {it.interval_high:.2f}"
    return (
        f"{policy} is {it.mean:.2f} times as fast as {first} in mean completion time (runs "
        f"{it.least:.2f} to {it.most:.2f}{interval}): {it.waiting_gain_s / 3600:.2f} h of the gain "
        f"are waiting, {it.running_gain_s / 3600:.2f} h running"
    )
