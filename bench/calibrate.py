# SPDX-License-Identifier: Apache-2.0
"""Does the simulator predict how long jobs take? Runs live jobs on a pool of `penstock up`, and
asks the simulator about the same jobs.

Workers and trainers sleep instead of computing, so two cores can simulate a pool's CPUs. Each round
runs every case once. The simulator is given the worker seconds and the step of each job, its
arrival time, and the start-up delay of the rounds' jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from figures import MeasurementError, Record, add_report_options, report, summary

from penstock import _pool
from penstock_simulator import _simulator

HERE = Path(__file__).resolve().parent
WORKERS = 12
START_S_MAX = 180.0
JOB_S_MAX = 400.0
POOL_INTERVAL_S = 2.5  # the least time for which a pool job is measured


@dataclass(frozen=True, slots=True)
class Job:
    arrives_s: float
    worker_s: float  # of one worker, for a batch
    step_s: float  # of the trainer, for a batch
    batches: int

    @property
    def name(self) -> str:
        return f"w{self.worker_s:g}-s{self.step_s:g}-at{self.arrives_s:g}"


CASES = {
    # It can use 6 workers.
    "one": (Job(0, 0.6, 0.1, 600),),
    # They can use 8 and 7, and there are 12.
    "two": (Job(0, 0.8, 0.1, 600), Job(20, 0.7, 0.1, 500)),
    # They can use 9, 6 and 3.
    "three": (Job(0, 0.9, 0.1, 500), Job(15, 0.6, 0.1, 500), Job(30, 0.3, 0.1, 400)),
}


class LivePool:
    """A pool that `penstock up` runs with at most `worker_count` workers, and at least
    `worker_count_min` at any time. A context manager.
    """

    def __init__(self, folder: Path, worker_count: int, worker_count_min: int) -> None:
        self.keys = str(folder / "keys")
        self.endpoint = ""
        self._folder = folder
        self._worker_count = worker_count
        self._worker_count_min = worker_count_min
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LivePool:
        penstock = [sys.executable, "-m", "penstock"]
        least, most = str(self._worker_count_min), str(self._worker_count)
        subprocess.run([*penstock, "keys", self.keys], check=True, capture_output=True)
        self._process = subprocess.Popen(
            [*penstock, "up", "--engine", "local", "--min", least, "--max", most]
            + ["--keys", self.keys, "--state", str(self._folder / "state")],
            stdout=subprocess.PIPE,
            stderr=(self._folder / "up.log").open("w"),
            text=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_ready(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if "export PENSTOCK_POOL=" in line:
                self.endpoint = line.strip().rpartition("=")[2]
                break
        else:
            raise MeasurementError(f"penstock up ended: {(self._folder / 'up.log').read_text()}")
        deadline = time.monotonic() + START_S_MAX
        while (count := len(self.status()["workers"])) < self._worker_count_min:
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"only {count} of {self._worker_count_min} workers joined in {START_S_MAX:g} s"
                )
            time.sleep(0.5)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(_pool.pool_status(self.endpoint, self.keys, 10.0))
        return status

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of one live job."""

    completion_s: float
    first_batch_s: float


def run_live(pool: LivePool, jobs: Sequence[Job], log: list[Any] | None = None) -> list[Run]:
    """Runs the jobs, each from its arrival on. ``log`` is given the pool's status every second."""
    with contextlib.ExitStack() as stack:
        trainers = [stack.enter_context(_trainer(pool, job)) for job in jobs]
        for trainer in trainers:
            assert trainer.stdout is not None
            if trainer.stdout.readline() != "ready\n":
                raise MeasurementError("a trainer ended before it started; its output is above")
        begin = time.monotonic()
        waiting = list(zip(jobs, trainers, strict=True))
        while waiting or any(trainer.poll() is None for trainer in trainers):
            now_s = time.monotonic() - begin
            while waiting and waiting[0][0].arrives_s <= now_s:
                _, trainer = waiting.pop(0)
                assert trainer.stdin is not None
                trainer.stdin.write("go\n")
                trainer.stdin.flush()
            if now_s > JOB_S_MAX:
                raise MeasurementError(f"the jobs did not end within {JOB_S_MAX:g} s")
            if log is not None:
                log.append((round(now_s, 1), pool.status()["trainers"]))
            due_s = waiting[0][0].arrives_s - (time.monotonic() - begin) if waiting else 1.0
            time.sleep(min(1.0, max(0.0, due_s)))
        return [Run(**_read_result(trainer)) for trainer in trainers]


@contextlib.contextmanager
def _trainer(pool: LivePool, job: Job) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "calibrate_job.py"), "--pool", pool.endpoint]
    command += ["--keys", pool.keys, "--worker-s", str(job.worker_s)]
    command += ["--step-s", str(job.step_s), "--batches", str(job.batches)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()


def _read_result(trainer: subprocess.Popen[str]) -> dict[str, float]:
    assert trainer.stdout is not None
    line = trainer.stdout.readline()
    if trainer.returncode != 0 or not line:
        raise MeasurementError(
            f"a trainer exited with code {trainer.returncode}; its output is above"
        )
    said: dict[str, float] = json.loads(line)
    return said


def predict(jobs: Sequence[Job], start_delay_s: float, worker_count: int) -> list[float]:
    """Completion times by the simulator, with the settings that a pool has."""
    cpus = ",".join(f"cpu{count}" for count in range(1, worker_count + 1))
    profiles = [f"model,class,iteration_s,batch,sample_bytes,{cpus}"]
    table = ["submit_s,duration_s,num_gpus,vc,model"]
    for job in jobs:
        speeds = [min(1.0, n * job.step_s / job.worker_s) for n in range(1, worker_count + 1)]
        curve = ",".join(f"{speed:.9f}" for speed in speeds)
        profiles.append(f"{job.name},other,{job.step_s},1,0,{curve}")
        table.append(f"{job.arrives_s},{job.batches * job.step_s},1,,{job.name}")
    outcome = _simulator.simulate(
        _simulator.JobTable.parse(
            "jobs",
            "\n".join(table),
            vc="",
            duration_min_s=0,
            gpus_max=len(jobs),
            job_skip_count=0,
            job_count_max=0,
        ),
        _simulator.ProfileTable.parse("profiles", "\n".join(profiles)),
        server_count=1,
        gpus_per_server=len(jobs),
        cpus_per_gpu=worker_count // len(jobs),
        link_bytes_per_s=1e12,
        split=(1, 0, 0),
        order="fifo",
        preempts=False,
        policy="penstock",
        start_delay_s=start_delay_s,
        move_cost_s=_simulator.POOL_MOVE_COST_S,
        interval_s=POOL_INTERVAL_S,
        horizon_s=_simulator.POOL_HORIZON_S,
        floor_share=_simulator.POOL_FLOOR_SHARE,
        noise=0,
        seed=0,
    )
    return outcome.completions_s


def measure(args: argparse.Namespace) -> Iterator[Record]:
    cases = {name: CASES[name] for name in CASES if args.only is None or name in args.only}
    if args.quick:
        cases = {
            name: tuple(replace(job, batches=20, arrives_s=0) for job in jobs)
            for name, jobs in cases.items()
        }
    runs: dict[str, list[list[Run]]] = {name: [] for name in cases}
    least = args.workers if args.min is None else args.min
    with (
        tempfile.TemporaryDirectory() as folder,
        LivePool(Path(folder), args.workers, least) as pool,
    ):
        for turn in range(args.rounds):
            for name, jobs in cases.items():
                log: list[Any] | None = [] if args.log else None
                runs[name].append(run_live(pool, jobs, log))
                took = [round(run.completion_s, 1) for run in runs[name][-1]]
                print(f"round {turn + 1}, {name}: {took} s", file=sys.stderr)
                if args.log:
                    with args.log.open("a") as file:
                        file.write(json.dumps({"round": turn, "case": name, "status": log}) + "\n")
    for name, jobs in cases.items():
        for place, job in enumerate(jobs):
            of_job = [run[place] for run in runs[name]]
            for figure in ("completion_s", "first_batch_s"):
                yield summary(
                    f"calibrate/{name}/{place}/{figure}",
                    {"case": name, "workers": args.workers, "workers_min": least, **asdict(job)},
                    [getattr(run, figure) for run in of_job],
                )


def render(records: Sequence[Record]) -> str:
    """Predicted and measured completion times, by case and job."""
    delays = [r["median"] for r in records if r["name"].endswith("/first_batch_s")]
    delay_s = median(delays)
    rows = [
        f"start-up delay {delay_s:.2f} s (jobs: {min(delays):.2f} to {max(delays):.2f})\n",
        "| case | job | measured s | p10..p90 | n | predicted s | predicted / measured |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    completions = [r for r in records if r["name"].endswith("/completion_s")]
    for case in dict.fromkeys(r["parameters"]["case"] for r in completions):
        of_case = [r for r in completions if r["parameters"]["case"] == case]
        jobs = [
            Job(**{one.name: r["parameters"][one.name] for one in fields(Job)}) for r in of_case
        ]
        predicted = predict(jobs, delay_s, of_case[0]["parameters"]["workers"])
        for job, record, predicted_s in zip(jobs, of_case, predicted, strict=True):
            what = (
                f"at {job.arrives_s:g} s: {job.batches} batches, {job.worker_s:g} s of worker time "
                f"and {job.step_s:g} s of trainer time each"
            )
            rows.append(
                f"| {case} | {what} | {record['median']:.1f} | {record['p10']:.1f}.."
                f"{record['p90']:.1f} | {record['n']} | {predicted_s:.1f} | "
                f"{predicted_s / record['median']:.3f} |"
            )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument(
        "--min", type=int, help="minimum number of running workers (default: --workers)"
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES))
    parser.add_argument("--quick", action="store_true", help="smoke test with short jobs")
    parser.add_argument("--log", type=Path, help="output file for the pool's status at each second")
    add_report_options(parser)
    args = parser.parse_args()
    return 0 if report("calibrate.py", args, measure, render) is not None else 2


if __name__ == "__main__":
    sys.exit(main())
