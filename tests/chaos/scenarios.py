# SPDX-License-Identifier: Apache-2.0
"""The scenarios. Each makes its pool, runs streams through it, and injects its faults into them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import no_more_descriptors, stopped
from namespaces import CUTS, NotHere, TinyFolder, memory_group, network, tiny_folder
from outcomes import Outcome
from paced_datasets import LEAK_VARIABLE
from pool_processes import Worker
from trainers import Trainer
from trials import Trial
from worker_processes import all_processes, job_processes, warm_processes

GROUP_BYTES = 192 << 20
# How many workers each supervisor has.
ONE_EACH, ONE_AND_SEVERAL, ALL_OF_ONE = (1, 1, 1), (1, 2), (3,)
LEAK_BYTES = 1 << 20  # with every sample
SHORT = {"sample_count": 800, "epoch_count": 2}  # where every stream has one fault


# A worker process is the server of one or more workers, unless stated otherwise.


def one_of_several(trial: Trial) -> int | None:
    """A worker process where another makes batches meanwhile."""
    settled = trial.settled()
    pids = [pid for pid in trial.listening() if settled.keys() - {pid}]
    return trial.rng.choice(pids) if pids else None


def kill_worker(trial: Trial, trainer: Trainer) -> None:
    victim = one_of_several(trial)
    if victim is not None:
        trial.fault(f"SIGKILL of worker process {victim}")
        trial.kill(victim)


def kill_warm_process(trial: Trial, trainer: Trainer) -> None:
    """Its job processes end with it, and so does its server, which another worker process
    replaces."""
    server = one_of_several(trial)
    found = [] if server is None else warm_processes(server)
    if server is not None and found:
        warm = trial.rng.choice(found)
        trial.fault(f"SIGKILL of the warm process {warm} of worker process {server}")
        trial.end_warm(server, warm)


def one_job(trial: Trial) -> tuple[int, int] | None:
    """A worker process that makes batches, and one of its job processes."""
    found = [
        (server, job)
        for server, count in trial.settled().items()
        for job in job_processes(server, count)
    ]
    return trial.rng.choice(found) if found else None


def kill_job(trial: Trial, trainer: Trainer) -> None:
    """Its server lives, and has another one forked immediately. A batch over which three processes
    die fails, as intended, so this waits until all workers have had time for the earlier ones."""
    found = one_job(trial) if trial.are_all_settled else None
    if found is not None:
        server, job = found
        number = trial.rng.choice((signal.SIGKILL, signal.SIGSEGV))
        trial.fault(f"{number.name} of the job's process {job} of worker process {server}")
        trial.end_job(server, job, number)


def stop_job(trial: Trial, trainer: Trainer) -> None:
    """Its server keeps sending heartbeats, so that a batch of a shard has to wait."""
    found = one_job(trial)
    if found is not None:
        server, job = found
        trial.fault(f"SIGSTOP of the job's process {job} of worker process {server}")
        with stopped(job):
            trainer.runs_for(trial.rng.uniform(0.3, 4.0))


def kill_all_workers(trial: Trial, trainer: Trainer) -> None:
    pids = list(trial.listening())
    trial.fault(f"SIGKILL of all worker processes, {pids}, and of who starts them")
    trial.kill(*(worker.process.pid for worker in trial.workers), *pids)
    for worker in trial.workers:
        worker.wait()
    trainer.runs_for(trial.rng.uniform(0.0, 2.0))
    trial.start_workers(trial.worker_counts)


def kill_controller(trial: Trial, trainer: Trainer) -> None:
    """In one case of three a worker is lost as well, and has to find the next controller. A trainer
    whose workers do not persist asks a controller for some at the start of each epoch, so the
    stream has to continue before the next fault."""
    settled = list(trial.settled())
    victims = settled[:1] if len(settled) > 1 and trial.rng.random() < 1 / 3 else []
    trial.fault(f"SIGKILL of the controller, and of worker processes {victims}")
    trial.controller.end(signal.SIGKILL)
    trial.kill(*victims)
    trainer.runs_for(trial.rng.uniform(0.0, 3.0))
    trial.controller = trial.pool.start_controller(bind=trial.pool.endpoint)


def stop_worker(trial: Trial, trainer: Trainer) -> None:
    """For longer than its lease: by the time it resumes, others have made its outstanding
    batches."""
    settled = list(trial.settled())
    if len(settled) > 1:
        victim = trial.rng.choice(settled)
        trial.fault(f"SIGSTOP of worker process {victim}")
        with stopped(victim):
            trainer.runs_for(trial.rng.uniform(2.1, 4.0))


JOB_FAULTS = (kill_job, stop_job, kill_warm_process)
POOL_FAULTS = (*JOB_FAULTS, kill_worker, stop_worker, kill_controller, kill_all_workers)


def repeat_faults(*faults: Callable[[Trial, Trainer], None]) -> Callable[[Trial], None]:
    """One fault after the other, in turn, at any instant of a stream that has continued since the
    last one. The workers of every other stream persist. The number of workers per supervisor is
    drawn unless it is given: where a server is lost, there is more than one supervisor."""
    layouts: tuple[tuple[int, ...], ...] = (ONE_EACH, ONE_AND_SEVERAL)
    if set(faults) <= {kill_job, stop_job}:
        layouts = (*layouts, ALL_OF_ONE)

    def run(trial: Trial) -> None:
        trial.controller = trial.pool.processes[0]
        trial.worker_counts = trial.worker_counts or trial.rng.choice(layouts)
        trial.start_workers(trial.worker_counts)
        for number, stream in enumerate(trial.streams()):
            with trial.training(stream, persistent_workers=number % 2 == 0) as trainer:
                while trial.wants_more and trainer.wait_for_batches(trial.rng.randint(1, 40)):
                    if trainer.runs_for(trial.rng.uniform(0.0, 0.3)):
                        faults[trial.outcome.fault_count % len(faults)](trial, trainer)
        trial.expect_servers()

    return run


def kill_trainers(trial: Trial) -> None:
    """Another process resumes, with other workers: the pool's, local ones in addition, only local
    ones, or none."""
    extra: Worker | None = None
    trial.pool.start_worker(processes=2)
    for stream in trial.streams():
        trainers: list[Trainer] = []
        while True:
            options = trial.rng.choice(
                [
                    {"num_workers": 0},
                    {"num_workers": 1},
                    {"num_workers": 2},
                    {"pool": None, "num_workers": 2},
                    {"pool": None, "num_workers": 0},
                ]
            )
            if not trainers:
                options = {"num_workers": 0}
            before = trainers[-1] if trainers else None
            trainers.append(trial.start_trainer(stream, resumes=before, **options))
            trainer = trainers[-1]
            # In one case of eight before it has a batch.
            if trial.rng.random() < 7 / 8:
                trainer.wait_for_batches(1)
            if not trainer.runs_for(trial.rng.uniform(0.1, 2.0)) or not trial.wants_more:
                break
            count = len(trainer.deliveries)
            trial.fault(f"SIGKILL of the trainer with {options} after {count} batches")
            trial.kill(trainer.process.pid)
            trainer.kill()
            if trial.rng.random() < 1 / 4:
                if extra is None:
                    extra = trial.pool.start_worker()
                else:
                    extra.end()
                    extra = None
        trial.check_delivery(trainers, stream, trainers[-1].finish())
        for trainer in trainers:
            trainer.close()


def cut_links(trial: Trial) -> None:
    """The workers are on another host than the trainer, with the keys of `penstock keys`. In every
    other stream the trainer has a local worker in addition to them."""
    keys = str(trial.folder / "keys")
    made = subprocess.run(
        [sys.executable, "-m", "penstock", "keys", keys],
        env=trial.pool.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    with network() as hosts:
        try:
            bind = f"tcp://{hosts.near_address}:0"
            trial.pool.start_controller("--keys", keys, bind=bind, within=hosts.near)
            trial.pool.start_worker("--keys", keys, processes=2, within=hosts.far)
            for number, stream in enumerate(trial.streams(values=8192)):
                own = {"num_workers": number % 2}
                with trial.training(stream, within=hosts.near, keys=keys, **own) as trainer:
                    while trial.wants_more and trainer.runs_for(trial.rng.uniform(0.3, 2.0)):
                        how = CUTS[trial.outcome.fault_count % len(CUTS)]
                        seconds = trial.rng.uniform(0.3, 6.0)
                        trial.fault(f"the link is cut for {seconds:.1f} s: {how}")
                        hosts.cut(how)
                        try:
                            trainer.runs_for(seconds)
                        finally:
                            hosts.heal(how)
        finally:
            trial.end_processes(0)


def fill_shared_memory(trial: Trial) -> None:
    _fill(trial, tiny_folder("/dev/shm"))


def fill_disks(trial: Trial) -> None:
    _fill(trial, tiny_folder(str(trial.temporary)))


def _fill(trial: Trial, tiny: TinyFolder) -> None:
    """Of a single worker, of one of two, or of a trainer with a local worker: before the worker
    knows the job, or while it serves."""
    for number, stream in enumerate(trial.streams(**SHORT)):
        who = ("the only worker", "one of two workers", "the trainer")[number % 3]
        squeezed = trial.pool.start_worker(within=() if who == "the trainer" else tiny.within)
        if who == "one of two workers":
            trial.pool.start_worker()
        is_before = number % 2 == 0 and who != "the trainer"
        if is_before:
            trial.fault(f"{tiny.path} of {who} is full before the stream begins")
            tiny.fill(squeezed.process.pid)
        within = tiny.within if who == "the trainer" else ()
        own = {"num_workers": int(who == "the trainer")}
        with trial.training(
            stream, within=within, may_fail=True, waits_for_a_batch=not is_before, **own
        ) as trainer:
            if not is_before and trainer.runs_for(trial.rng.uniform(0.1, 1.0)):
                trial.fault(f"{tiny.path} of {who} is full")
                tiny.fill(trainer.process.pid if who == "the trainer" else squeezed.process.pid)
        trial.end_processes(1)


STARVED = (
    "a trainer",
    "a server",
    "a trainer from its start on",
    "a worker from its start on",
    "a warm process",
    "the process of a job",
)


def exhaust_descriptors(trial: Trial) -> None:
    """No more descriptors can be opened: by a trainer whose workers change, by a worker process
    whose trainers change; for a while, or from the start."""
    # Only root can see the open descriptors of a server.
    starved = [who for who in STARVED if who != "a server" or os.geteuid() == 0]
    for number, stream in enumerate(trial.streams(**SHORT)):
        who = starved[number % len(starved)]
        if who == "a worker from its start on":
            limit = trial.rng.choice((12, 16, 24, 32, 48))
            trial.fault(f"a worker may have {limit} descriptors from its start on")
            within = ("prlimit", f"--nofile={limit}", "--")
            arguments = ["worker", "--controller", trial.pool.endpoint]
            trial.pool.processes.append(Worker(arguments, trial.pool.environment, within))
        trial.start_workers((1, 1))  # one continues where the other's server cannot
        server = next(iter(trial.listening()))
        if who == "a trainer from its start on":
            limit = trial.rng.choice((16, 24, 32, 48))
            trial.fault(f"a trainer may have {limit} descriptors from its start on")
            within = ("prlimit", f"--nofile={limit}", "--")
            with trial.training(stream, within=within, may_fail=True, waits_for_a_batch=False):
                pass
        elif who == "a worker from its start on":
            with trial.training(stream):
                pass
        elif who in ("a server", "a warm process"):
            pid = server if who == "a server" else warm_processes(server)[0]
            with no_more_descriptors(pid) as limit:
                trial.fault(f"{who}, {pid}, may have no more than {limit} descriptors")
                with trial.training(stream):
                    pass
        elif who == "the process of a job":
            with trial.training(stream) as trainer:
                goes_on = trainer.runs_for(trial.rng.uniform(0.1, 1.0))
                for pid in job_processes(server) if goes_on else []:
                    with no_more_descriptors(pid) as limit:
                        trial.fault(f"{who}, {pid}, may have no more than {limit} descriptors")
                        trainer.runs_for(trial.rng.uniform(4.0, 8.0))
        else:
            with trial.training(stream, may_fail=True) as trainer:
                if trainer.runs_for(trial.rng.uniform(0.1, 1.0)):
                    with no_more_descriptors(trainer.process.pid) as limit:
                        trial.fault(f"the trainer may have no more than {limit} descriptors")
                        trial.kill(*trial.listening())
                        trainer.runs_for(trial.rng.uniform(4.0, 8.0))
        trial.end_processes(1)


def exhaust_memory(trial: Trial) -> None:
    """The process of a job that leaks memory is killed by the kernel, over and over; another worker
    is healthy."""
    with memory_group(GROUP_BYTES) as group:
        try:
            worker = trial.pool.start_worker(within=("env", f"{LEAK_VARIABLE}={LEAK_BYTES}"))
            trial.pool.start_worker()
            added: set[int] = set()
            seen_count = 0
            for stream in trial.streams():
                with trial.training(stream) as trainer:
                    while trainer.runs_for(0.05) and trial.wants_more:
                        # Job processes that are forked from now on are in the warm process's group.
                        for pid in set(all_processes(worker.process.pid)) - added:
                            added.add(pid)
                            group.add(pid)
                        while seen_count < group.kill_count:
                            seen_count += 1
                            trial.fault("the kernel killed a process of a worker without memory")
        finally:
            trial.end_processes(0)


@dataclass(frozen=True, slots=True)
class Scenario:
    run: Callable[[Trial], None]
    fault_count: int  # of the full form
    has_own_controller: bool = False
    is_stall_bounded: bool = False  # one of several workers that can make its batches is lost


SCENARIOS: Mapping[str, Scenario] = {
    "kill-workers": Scenario(repeat_faults(kill_worker), 50, is_stall_bounded=True),
    "kill-all-workers": Scenario(repeat_faults(kill_all_workers), 10),
    "kill-controllers": Scenario(repeat_faults(kill_controller), 20),
    "stop-workers": Scenario(repeat_faults(stop_worker), 20, is_stall_bounded=True),
    "kill-jobs": Scenario(repeat_faults(kill_job), 30, is_stall_bounded=True),
    "stop-jobs": Scenario(repeat_faults(stop_job), 20),
    "kill-warm-processes": Scenario(repeat_faults(kill_warm_process), 20, is_stall_bounded=True),
    "mixed": Scenario(repeat_faults(*POOL_FAULTS), 35),
    "kill-trainers": Scenario(kill_trainers, 20),
    "cut-links": Scenario(cut_links, 10, has_own_controller=True),
    "full-shared-memory": Scenario(fill_shared_memory, 5),
    "full-disks": Scenario(fill_disks, 5),
    "no-descriptors": Scenario(exhaust_descriptors, len(STARVED)),
    "no-memory": Scenario(exhaust_memory, 5),
}


def run_scenario(
    name: str,
    folder: Path,
    *,
    seed: int,
    fault_count: int | None = None,
    stream_options: Mapping[str, Any] | None = None,
    worker_counts: Sequence[int] = (),
) -> Outcome:
    scenario = SCENARIOS[name]
    trial = Trial(
        name,
        folder,
        seed=seed,
        fault_count=scenario.fault_count if fault_count is None else fault_count,
        stream_options=stream_options,
        worker_counts=worker_counts,
    )
    trial.outcome.is_stall_bounded = scenario.is_stall_bounded
    try:
        if not scenario.has_own_controller:
            trial.pool.start_controller()
        scenario.run(trial)
    except NotHere as err:
        trial.outcome.skipped = str(err)
    except Exception:
        trial.report_failure(traceback.format_exc())
    finally:
        trial.close()
    return trial.outcome
