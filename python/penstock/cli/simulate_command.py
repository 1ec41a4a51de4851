# SPDX-License-Identifier: Apache-2.0
"""The command ``penstock simulate``: how long a cluster's jobs take by how its CPUs are shared."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from penstock import _pool
from penstock.cli.command_parser import (
    CommandParser,
    carry_out,
    did_you_mean,
    one_of,
    seconds,
    whole_number,
)
from penstock.cli.simulation_table import FIGURES, Runs, comparison, table

DURATION_MIN_S = 60.0
INTERVAL_S = 60.0
FLOOR_SHARE = 0.25
SYNTHETIC_JOBS = 500
SYNTHETIC_LOAD = 1.0
_GPUS_MAX = 4096
_SEEDS_MAX = 1000
_FILE_BYTES_MAX = 1 << 28
_BYTES_PER_GBIT = 1e9 / 8
_SHIPPED_PROFILES = "synergy_profiles.csv"


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries the command out; returns the exit code. Raises CommandError for arguments that it
    does not take."""
    return carry_out({command: _simulate_command}, command, arguments)


def _simulate_command(arguments: Sequence[str]) -> int:
    args = _parser().parse(arguments)
    runs = _simulate(args, _jobs(args), _profiles(args.profiles))
    print(json.dumps(_fields(args, runs), indent=2) if args.json else _text(args, runs))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "simulate",
        "simulate [--jobs FILE] [OPTION ...]",
        """\
Simulates the jobs of a cluster, and says how long they take by each way to share its CPUs. Each
policy runs the same jobs, once for each seed; a seed decides which model each job is given.
`tuned` shares inside a server as Synergy does, `tf-data-service` takes as many workers as the
formula of tf.data service says, and `infinite` is the bound. Policies of other systems are
penstock's reading of their rules.""",
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
        help="jobs to simulate, as CSV with the columns submit_s,duration_s,num_gpus,vc "
        f"(default: {SYNTHETIC_JOBS} synthetic ones)",
    )
    add("--vc", metavar="NAME", default="", help="virtual cluster whose jobs are taken of FILE")
    add(
        "--first",
        type=whole_number(1, 1_000_000),
        metavar="N",
        help=f"number of jobs, the first ones of {DURATION_MIN_S:g} s and more that the cluster "
        "has GPUs for (default: all)",
    )
    add(
        "--profiles",
        metavar="FILE",
        help="speed of models by CPUs, as CSV with the columns "
        "model,class,iteration_s,batch,sample_bytes,cpu1,cpu2,... (default: twelve models of "
        "Synergy)",
    )
    add(
        "--servers",
        type=_servers,
        default=(8, 8),
        metavar="SERVERSxGPUS",
        help="number of servers, and of GPUs in each (default: 8x8)",
    )
    add(
        "--cpus-per-gpu",
        type=whole_number(1, 1024),
        default=3,
        metavar="N",
        help="CPUs of a server for each of its GPUs (default: 3)",
    )
    add(
        "--order",
        type=one_of(("fifo", "srtf")),
        default="fifo",
        metavar="ORDER",
        help="order in which jobs get GPUs: fifo, or srtf, the shortest remaining time first "
        "without preemption (default: fifo)",
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
        default=list(_pool.CPU_POLICIES),
        metavar="NAME,...",
        help=f"policies; each is compared with the first (default: {','.join(_pool.CPU_POLICIES)})",
    )
    add(
        "--seeds",
        type=whole_number(1, _SEEDS_MAX),
        default=5,
        metavar="N",
        help="number of seeds, from 0 on (default: 5)",
    )
    add(
        "--delay",
        type=seconds(0),
        default=5.0,
        metavar="SECONDS",
        help="time from when a worker is given to a job until it works (default: 5)",
    )
    add(
        "--link",
        type=_number(0.001, 1e6),
        default=10.0,
        metavar="GBIT",
        help="Gbit/s into each server (default: 10)",
    )
    add(
        "--noise",
        type=_number(0, 10),
        default=0.1,
        metavar="SHARE",
        help="standard deviation of the logarithm of what is measured (default: 0.1)",
    )
    add(
        "--move-cost",
        type=seconds(0),
        metavar="SECONDS",
        help="time that penstock's policy reckons a moved worker to lose (default: that of "
        "--delay)",
    )
    add(
        "--horizon",
        type=seconds(1),
        default=300.0,
        metavar="SECONDS",
        help="time over which penstock's policy counts the gain of a move (default: 300)",
    )
    add("--json", action="store_true", help="print all figures of each run, for programs")
    return parser


def _jobs(args: argparse.Namespace) -> _pool.JobTable:
    gpu_count = math.prod(args.servers)
    if args.jobs is None:
        if args.vc:
            raise ValueError(
                f"the VC is {args.vc!r} and there is no file of jobs; name one by --jobs FILE"
            )
        return _pool.JobTable.synthetic(
            job_count=args.first or SYNTHETIC_JOBS,
            gpu_count=gpu_count,
            load=SYNTHETIC_LOAD,
            seed=0,
        )
    return _pool.JobTable.parse(
        args.jobs,
        _read(args.jobs),
        vc=args.vc,
        duration_min_s=DURATION_MIN_S,
        gpus_max=gpu_count,
        job_count_max=args.first or 0,
    )


def _profiles(file: str | None) -> _pool.ProfileTable:
    if file is not None:
        return _pool.ProfileTable.parse(file, _read(file))
    shipped = files("penstock") / "data" / _SHIPPED_PROFILES
    return _pool.ProfileTable.parse(_SHIPPED_PROFILES, shipped.read_text(encoding="utf-8"))


def _read(file: str) -> str:
    path = Path(file)
    size = path.stat().st_size
    if size > _FILE_BYTES_MAX:
        raise ValueError(
            f"{file} has {size} bytes; at most {_FILE_BYTES_MAX} are read; cut it down"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(f"{file} is no text in UTF-8 ({err}); save it as UTF-8") from err


def _simulate(args: argparse.Namespace, jobs: _pool.JobTable, profiles: _pool.ProfileTable) -> Runs:
    servers, gpus = args.servers
    return {
        policy: [
            _pool.simulate(
                jobs,
                profiles,
                server_count=servers,
                gpus_per_server=gpus,
                cpus_per_gpu=args.cpus_per_gpu,
                link_bytes_per_s=args.link * _BYTES_PER_GBIT,
                split=args.split,
                order=args.order,
                preempts=False,
                policy=policy,
                start_delay_s=args.delay,
                move_cost_s=args.delay if args.move_cost is None else args.move_cost,
                interval_s=INTERVAL_S,
                horizon_s=args.horizon,
                floor_share=FLOOR_SHARE,
                noise=args.noise,
                seed=seed,
            )
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
    return (
        f"{source}; {servers} servers of {gpus} GPUs, {args.cpus_per_gpu} CPUs a GPU, "
        f"{args.order}, split {split} of image/language/speech, {args.seeds} seeds\n\n"
        f"{table(runs)}"
    )


def _fields(args: argparse.Namespace, runs: Runs) -> dict[str, object]:
    options = {name: value for name, value in vars(args).items() if name != "json"}
    return {
        "options": options,
        "is_synthetic": args.jobs is None,
        "policies": {
            policy: {
                "runs": [{name: getattr(run, name) for name in FIGURES} for run in reports],
                "speedup_over_first": comparison(runs, policy)._asdict(),
            }
            for policy, reports in runs.items()
        },
    }


def _servers(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found and int(found[1]) * int(found[2]) <= _GPUS_MAX:
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(
        f"is {text!r}; servers and GPUs of each such as 8x8, at most {_GPUS_MAX} GPUs, are expected"
    )


def _split(text: str) -> tuple[float, float, float]:
    found = re.fullmatch(
        r"(\d{1,6}(?:\.\d{1,6})?)/(\d{1,6}(?:\.\d{1,6})?)/(\d{1,6}(?:\.\d{1,6})?)", text
    )
    if found and any(float(share) > 0 for share in found.groups()):
        return float(found[1]), float(found[2]), float(found[3])
    raise argparse.ArgumentTypeError(
        f"is {text!r}; shares of image/language/speech such as 20/70/10 are expected"
    )


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _pool.CPU_POLICIES:
            meant = did_you_mean(name, _pool.CPU_POLICIES)
            there_are = f"; there are {', '.join(_pool.CPU_POLICIES)}"
            raise argparse.ArgumentTypeError(f"has {name!r}{meant or there_are}")
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
            f"is {text!r}; a number from {least:g} to {most:g} is expected"
        )

    return convert
