# SPDX-License-Identifier: Apache-2.0
"""Workers as Slurm jobs, one job per worker. A large request is submitted as an array of jobs.

Slurm does not restart a job by itself (``--no-requeue``): the adapter requests another one. A job
is identified by its name. A preempted job gets SIGTERM, upon which a worker finishes its batches.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from penstock.engines.engine import (
    NAME_VARIABLE,
    WORKER_NAME,
    EngineError,
    EngineRefusal,
    WorkerCommand,
    WorkerState,
    last_line,
    make_log_folder,
)
from penstock.pool.worker_spec import DRAIN_GRACE_S
from penstock.secret_names import looks_secret

_CALL_LIMIT_S = 10.0
_ARRAY_COUNT_MIN = 8  # workers that are requested at the same time, in one call
_ARRAY = "array-"
# The part of the submission environment that workers get: locations of programs and libraries,
# language, and numbers of threads. Workers run other people's code on other machines.
_WORKER_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|XDG_(RUNTIME_DIR|CACHE_HOME)"
    r"|LD_(LIBRARY_PATH|PRELOAD)|VIRTUAL_ENV|CONDA_\w+|PYTHON\w+|PENSTOCK_\w+"
    r"|(OMP|MKL|KMP|GOMP|OPENBLAS)_\w+"
)
_SLURM_VARIABLES = re.compile(r"(SLURM|SBATCH)_\w+")  # its own configuration
_STATES = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING"),
        WorkerState.STARTING,
    ),
    **dict.fromkeys(
        ("RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED"), WorkerState.RUNNING
    ),
    "COMPLETING": WorkerState.STOPPING,
}


class SlurmEngine:
    """An `Engine`. ``prefix`` starts the names of this pool's jobs, and no other pool's.
    ``variables`` are names of further environment variables of this process that workers get."""

    title = "slurm"

    def __init__(
        self,
        command: WorkerCommand,
        prefix: str,
        log_folder: Path,
        *,
        partition: str | None = None,
        account: str | None = None,
        cpus: int = 1,
        memory_mb: int | None = None,
        grace_s: float = DRAIN_GRACE_S,
        variables: Collection[str] = (),
    ) -> None:
        self._command = command.arguments()
        self._prefix = prefix
        self._log_folder = log_folder
        self._environment = worker_environment(os.environ, variables)
        self._options = [
            "--parsable",
            "--no-requeue",
            "--ntasks=1",
            f"--cpus-per-task={cpus}",
            f"--signal=B:TERM@{max(1, round(grace_s))}",
            "--export=ALL",  # all that sbatch has
        ]
        if partition is not None:
            self._options.append(f"--partition={partition}")
        if account is not None:
            self._options.append(f"--account={account}")
        if memory_mb is not None:
            self._options.append(f"--mem={memory_mb}")

    def spawn(self, names: Sequence[str]) -> None:
        for name in names:
            if not WORKER_NAME.fullmatch(name):
                raise EngineRefusal(
                    f"a worker name must be pk-HEX-NUMBER, got {name[:80]!r}; it is written into a "
                    "job script"
                )
        make_log_folder(self._log_folder)
        first = self._first_of_row(names)
        if len(names) >= _ARRAY_COUNT_MIN and first is not None:
            # Tasks are numbered from 0, since Slurm limits their numbers.
            array = [f"--array=0-{len(names) - 1}", f"--job-name={self._prefix}{_ARRAY}{first}"]
            log = f"{self._prefix}{first}+%a"  # found again by _log_of
            self._submit(array, log, f"{self._prefix}$(({first} + SLURM_ARRAY_TASK_ID))", 0)
            return
        for granted_count, name in enumerate(names):
            self._submit([f"--job-name={name}"], name, name, granted_count)

    def _first_of_row(self, names: Sequence[str]) -> int | None:
        """Return the number of the first name if the numbers of the others follow it."""
        ends = [name.removeprefix(self._prefix) for name in names]
        if not all(end.isdecimal() for end in ends):
            return None
        first = int(ends[0])
        return first if ends == [str(first + place) for place in range(len(ends))] else None

    def _submit(
        self, arguments: Sequence[str], log_name: str, worker_name: str, granted_count: int
    ) -> None:
        log = self._log_folder / f"{log_name}.log"
        try:
            _run(
                ["sbatch", *self._options, *arguments, f"--output={log}"],
                # exec: the signals of the batch step reach the worker itself.
                text="#!/bin/sh\n"
                "unset SLURM_JWT\n"  # with which sbatch may log in
                f"export {NAME_VARIABLE}={worker_name}\n"
                f"exec {shlex.join(self._command)}\n",
                environment=self._environment,
            )
        except EngineError as error:
            raise EngineRefusal(str(error), granted_count) from error

    def stop(self, name: str, *, at_once: bool) -> None:
        job = self._jobs().get(name)
        if job is None:
            return
        job_id, state = job
        # A job that is pending has no batches to finish.
        is_to_drain = state == WorkerState.RUNNING and not at_once
        _run(["scancel", *(["--signal=TERM", "--batch"] if is_to_drain else []), job_id])

    def workers(self) -> dict[str, WorkerState]:
        return {name: state for name, (_, state) in self._jobs().items()}

    def last_log_line(self, name: str) -> str:
        return last_line(self._log_of(name))

    def _log_of(self, name: str) -> Path:
        """Return the log of a job or of an array task. A task's log has the number of the first
        worker and of the task in its name, since Slurm cannot add the two."""
        number = name.removeprefix(self._prefix)
        if number.isdecimal():
            for path in self._log_folder.glob(f"{self._prefix}*+*.log"):
                first, _, task = path.stem.removeprefix(self._prefix).partition("+")
                if first.isdecimal() and task.isdecimal() and int(first) + int(task) == int(number):
                    return path
        return self._log_folder / f"{name}.log"

    def _jobs(self) -> dict[str, tuple[str, WorkerState]]:
        """Return the number and the state of each job, by the worker's name."""
        form = "--format=%j|%i|%T"
        lines = _run(["squeue", "--noheader", "--array", form, f"--user={_user()}"]).splitlines()
        found: dict[str, tuple[str, WorkerState]] = {}
        for line in lines:
            job_name, job_id, word = line.strip().rsplit("|", 2)
            state = _STATES.get(word)
            if state is not None and job_name.startswith(self._prefix):
                found[self._worker_name(job_name, job_id)] = (job_id, state)
        return found

    def _worker_name(self, job_name: str, job_id: str) -> str:
        first = job_name.removeprefix(self._prefix + _ARRAY)
        task = job_id.partition("_")[2]
        if first == job_name or not (first.isdecimal() and task.isdecimal()):
            return job_name
        return f"{self._prefix}{int(first) + int(task)}"


def worker_environment(environ: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """Return the part of an environment that sbatch gets and passes to the job. Variables that look
    like secrets are left out unless they are ``named``."""
    return {
        name: value
        for name, value in environ.items()
        if name in named
        or _SLURM_VARIABLES.fullmatch(name)
        or (_WORKER_VARIABLES.fullmatch(name) and not looks_secret(name))
    }


def _user() -> str:
    return str(os.getuid())


def _run(
    command: list[str], text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_CALL_LIMIT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{command[0]} did not end within {_CALL_LIMIT_S:g} s") from error
    except OSError as error:
        raise EngineError(
            f"cannot run {command[0]}: {error}; the engine slurm needs its commands on PATH"
        ) from error
    if done.returncode != 0:
        raise EngineError(
            f"{command[0]} failed with exit code {done.returncode}: {done.stderr.strip()[:500]}"
        )
    return done.stdout
