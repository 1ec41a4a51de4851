# SPDX-License-Identifier: Apache-2.0
"""How soon a new trainer has its first batch from a worker that runs already, and how much memory
such a worker has.

A round starts a pool on loopback for each Python of --python, each of which has a separate penstock
installation: a controller and one `penstock worker` with --workers workers. Trainers run one after
another, each in a separate process. Each times its first batch from iter() on, and the first one of
a second epoch, for which it is connected already. The memory of the workers' processes is measured
before the first trainer starts and after the last has ended. The supervisor's is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The modules that import torch and numpy are imported after the measurements: if this process had
# mapped a page as well, a worker's part of it would be smaller.
import one_process
import process_tree
from pool_host import PoolError, end_process, end_with_parent

if TYPE_CHECKING:
    from figures import Record

HERE = Path(__file__).resolve().parent
LISTENS = "listens at tcp://"
START_S_MAX = 120.0
TRAINER_S_MAX = 120.0
IDLE_S_MAX = 30.0
SETTLE_S = 2.0
POLL_S = 0.02
ALL = "all"
KINDS = ("worker", "server", "warm", "job", "other", ALL)

TIMES = {
    "first_job_s": "first batch of a worker's first job, ms",
    "next_jobs_s": "first batch of the jobs after it, ms",
    "second_epoch_s": "first batch of a second epoch, ms",
}


@dataclass(frozen=True, slots=True)
class Pool:
    folder: str
    environment: dict[str, str]
    address: str
    supervisor_pid: int


@dataclass(slots=True)
class Measurements:
    """The measurements of one Python."""

    first_job_s: list[float] = field(default_factory=list)
    next_jobs_s: list[float] = field(default_factory=list)
    second_epoch_s: list[float] = field(default_factory=list)
    before: list[dict[str, int]] = field(default_factory=list)  # bytes by kind, one each round
    after: list[dict[str, int]] = field(default_factory=list)


@contextlib.contextmanager
def started_pool(python: str, worker_count: int) -> Iterator[Pool]:
    """A pool whose workers have no job yet, with separate keys."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pk"))
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "TMPDIR": folder}
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
            environment.pop(name, None)

        def start(*arguments: str, count: int = 1) -> tuple[int, str]:
            return stack.enter_context(command(python, arguments, folder, environment, count))

        _, last_output = start("controller", "--bind", "tcp://127.0.0.1:0")
        address = last_output.split("listens at ")[1].split(",")[0]
        workers = ("--controller", address, "--processes", str(worker_count))
        supervisor_pid, _ = start("worker", *workers, count=worker_count)
        yield Pool(folder, environment, address, supervisor_pid)


@contextlib.contextmanager
def command(
    python: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str], count: int
) -> Iterator[tuple[int, str]]:
    """A running penstock command: its pid, and the last of ``count`` lines with its addresses."""
    log = Path(folder, f"{arguments[0]}.log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-m", "penstock", *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
    try:
        yield process.pid, wait_for_endpoint(python, process, log, count)
    finally:
        end_process(process, signal.SIGTERM)


def wait_for_endpoint(python: str, process: subprocess.Popen[bytes], log: Path, count: int) -> str:
    deadline = time.monotonic() + START_S_MAX
    while True:
        has_ended = process.poll() is not None
        lines = log.read_text().rpartition("\n")[0].splitlines()
        listening = [line for line in lines if LISTENS in line]
        if len(listening) >= count:
            return listening[-1]
        if has_ended or time.monotonic() > deadline:
            last_output = lines[-1] if lines else "no output"
            raise PoolError(f"the {log.stem} of {python} did not start: {last_output}")
        time.sleep(POLL_S)


def train(python: str, pool: Pool) -> dict[str, float]:
    """The timings of one trainer."""
    done = subprocess.run(
        [python, str(HERE / "first_jobs_trainer.py"), pool.address],
        env=pool.environment,
        cwd=pool.folder,
        capture_output=True,
        text=True,
        timeout=TRAINER_S_MAX,
    )
    if done.returncode != 0:
        last_output = done.stderr.strip().splitlines() or ["no output"]
        raise PoolError(
            f"a trainer of {python} exited with code {done.returncode}: {last_output[-1]}"
        )
    timed: dict[str, float] = json.loads(done.stdout)
    return timed


def kinds_of(supervisor_pid: int) -> dict[int, str]:
    """The kind of each process below the supervisor. A worker that is a single process is a
    `worker`; else it is a `server`, the `warm` process and the processes of jobs."""
    parents = process_tree.parents(supervisor_pid)

    def kind(pid: int) -> str:
        parent = parents[pid]
        if parent == supervisor_pid:
            return "server" if program_of(pid) == "penstock-server" else "worker"
        return {"server": "warm", "warm": "job"}.get(kind(parent), "other")

    return {pid: kind(pid) for pid in parents}


def program_of(pid: int) -> str:
    return os.path.basename(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0])


def idle_bytes(pool: Pool) -> dict[str, int]:
    """The memory of the worker by kinds of processes, once all job processes have ended."""
    deadline = time.monotonic() + IDLE_S_MAX
    while "job" in kinds_of(pool.supervisor_pid).values():
        if time.monotonic() > deadline:
            raise PoolError(f"a job process still runs {IDLE_S_MAX:.0f} s after its trainer ended")
        time.sleep(POLL_S)
    time.sleep(SETTLE_S)
    found: Counter[str] = Counter()
    for pid, kind in kinds_of(pool.supervisor_pid).items():
        found[kind] += pss_bytes(pid)
    return {**found, ALL: found.total()}


def pss_bytes(pid: int) -> int:
    try:
        return one_process.pss_bytes(pid)
    except PermissionError:
        raise PoolError(
            "only root can read the memory of a worker's server; run this as root"
        ) from None


def measure_round(python: str, jobs: int, worker_count: int, seen: Measurements) -> None:
    with started_pool(python, worker_count) as pool:
        seen.before.append(idle_bytes(pool))
        for job in range(jobs):
            timed = train(python, pool)
            (seen.next_jobs_s if job else seen.first_job_s).append(timed["first_s"])
            seen.second_epoch_s.append(timed["second_s"])
        seen.after.append(idle_bytes(pool))


def measure(args: argparse.Namespace) -> tuple[dict[str, Measurements], float]:
    """The measurements of each Python, and how many cores others used meanwhile."""
    for python in args.python:  # brings the files into memory
        with started_pool(python, args.workers) as pool:
            train(python, pool)
    seen = {python: Measurements() for python in args.python}
    begin, busy_s = time.perf_counter(), process_tree.machine_busy_s()
    own_s = process_tree.usage(os.getpid()).cpu_s
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for python in args.python[:: -1 if turn % 2 else 1]:
            measure_round(python, args.jobs, args.workers, seen[python])
    own_s = process_tree.usage(os.getpid()).cpu_s - own_s
    others_s = process_tree.machine_busy_s() - busy_s - own_s
    return seen, max(0.0, others_s / (time.perf_counter() - begin))


def records(
    seen: dict[str, Measurements], foreign_cores: float, args: argparse.Namespace
) -> Iterator[Record]:
    from figures import summary

    jobs = args.jobs
    for python, its in seen.items():
        parameters = {"python": python, "jobs": jobs, "workers": args.workers}
        for metric in TIMES:
            values = getattr(its, metric)
            yield with_ends(f"first_jobs/{metric}", parameters, values, 6)
        for after_jobs, rounds in ((0, its.before), (jobs, its.after)):
            for kind in [kind for kind in KINDS if any(kind in found for found in rounds)]:
                values = [found.get(kind, 0) for found in rounds]
                of_kind = {**parameters, "kind": kind, "after_jobs": after_jobs}
                yield with_ends("first_jobs/pss_bytes", of_kind, values, 0)
    yield summary("first_jobs/foreign_cores", {"python": "all"}, [foreign_cores])


def with_ends(
    name: str, parameters: dict[str, Any], values: Sequence[float], ndigits: int
) -> Record:
    """One record with the smallest and the largest value, rounded like the median."""
    from figures import summary

    values = [round(value, ndigits) for value in values]
    record = summary(name, parameters, values, ndigits)
    return {**record, "min": min(values), "max": max(values), "values": values}


def table(everything: list[Record]) -> str:
    """Times and memory, a column for each Python: medians, with the least and the greatest."""
    from table import aligned, number

    found: dict[str, dict[str, str]] = {}  # by the title of the row, and by the Python
    pythons: list[str] = []
    for record in sorted(everything, key=place_of):
        title, scale = titled(record)
        if not title:
            continue
        python = record["parameters"]["python"]
        if python not in pythons:
            pythons.append(python)
        least, middle, most = (number(record[key] * scale) for key in ("min", "median", "max"))
        found.setdefault(title, {})[python] = f"{middle} ({least}..{most})"
    marks = [f"[{index + 1}]" for index, _ in enumerate(pythons)]
    heads = ["measured", *(marks if len(pythons) > 1 else ["figure"])]
    rows = [[title, *(cells.get(one, "-") for one in pythons)] for title, cells in found.items()]
    notes = [f"{mark} {python}" for mark, python in zip(marks, pythons, strict=True)]
    return "\n".join([aligned([heads, *rows]), *(notes if len(pythons) > 1 else [])])


def place_of(record: Record) -> tuple[int, int]:
    """In its row: times in their order, and then memory by kinds."""
    parameters = record["parameters"]
    return parameters.get("after_jobs", -1), KINDS.index(parameters.get("kind", ALL))


def titled(record: Record) -> tuple[str, float]:
    """The title of its row, and how many of the row's unit one is."""
    metric = record["name"].partition("/")[2]
    if metric in TIMES:
        return TIMES[metric], 1e3
    if metric != "pss_bytes":
        return "", 1.0
    parameters = record["parameters"]
    when = f"after {parameters['after_jobs']} jobs" if parameters["after_jobs"] else "before a job"
    return f"memory {when}: {parameters['kind']}, MB", 1e-6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--python", nargs="+", metavar="EXE", default=[sys.executable],
        help="Pythons with penstock installed, to compare (default: this one)",
    )  # fmt: skip
    add("--rounds", type=int, default=3, help="pools per Python (default: 3)")
    add("--jobs", type=int, default=10, help="trainers per pool (default: 10)")
    add("--workers", type=int, default=1, help="workers per pool, on this machine (default: 1)")
    add("--quick", action="store_true", help="smoke test: one round of two jobs")
    add(
        "--json",
        "--out",
        dest="out",
        type=Path,
        metavar="FILE",
        help="output file for the JSON lines",
    )
    add("--read", type=Path, metavar="FILE", help="print the table of such a file")
    parser.set_defaults(markdown=True)
    args = parser.parse_args()
    if args.rounds < 1 or args.jobs < 2 or args.workers < 1:
        parser.error(
            f"--rounds, --workers and --jobs must be >= 1, 1 and 2, got {args.rounds}, "
            f"{args.workers} and {args.jobs}"
        )
    if args.quick:
        args.rounds, args.jobs = 1, 2
    # Links are kept: the link of a virtual environment shows which it is.
    args.python = [os.path.abspath(python) for python in dict.fromkeys(args.python)]
    return args


def main() -> int:
    args = parse_arguments()
    measured: tuple[dict[str, Measurements], float] = ({}, 0.0)
    if args.read is None:
        try:
            measured = measure(args)
        except (PoolError, OSError, subprocess.TimeoutExpired) as error:
            print(f"first_jobs: {error}", file=sys.stderr)
            return 2

    from figures import report

    report("first_jobs", args, lambda _: records(*measured, args), table)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
