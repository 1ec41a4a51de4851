# SPDX-License-Identifier: Apache-2.0
"""Workers as jobs of Slurm, one job a worker.

Slurm does not start a job again by itself (``--no-requeue``): the adapter asks for another. A job
is known by its name. One that is preempted gets SIGTERM, with which a worker finishes its batches.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.engines.engine import (
    NAME_VARIABLE,
    EngineRefusal,
    EngineTrouble,
    WorkerCommand,
    WorkerState,
)

_CALL_LIMIT_S = 10.0
_STARTING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING"}
_RUNNING = {"RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED"}
_STOPPING = {"COMPLETING"}


class SlurmEngine:
    """An `Engine`. ``prefix`` begins the names of this pool's jobs, and of no other's."""

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
        grace_s: float = 30.0,
    ) -> None:
        self._command = [sys.executable, "-m", "penstock", *command.arguments()]
        self._prefix = prefix
        self._log_folder = log_folder
        self._options = [
            "--parsable",
            "--no-requeue",
            "--ntasks=1",
            f"--cpus-per-task={cpus}",
            f"--signal=B:TERM@{max(1, round(grace_s))}",
            "--export=ALL",
        ]
        if partition is not None:
            self._options.append(f"--partition={partition}")
        if account is not None:
            self._options.append(f"--account={account}")
        if memory_mb is not None:
            self._options.append(f"--mem={memory_mb}")

    def spawn(self, names: Sequence[str]) -> None:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        for granted_count, name in enumerate(names):
            log = self._log_folder / f"{name}.log"
            try:
                _run(
                    ["sbatch", *self._options, f"--job-name={name}", f"--output={log}"],
                    # exec: the signals of the batch step reach the worker itself.
                    text="#!/bin/sh\n"
                    f"export {NAME_VARIABLE}={name}\n"
                    f"exec {shlex.join(self._command)}\n",
                )
            except EngineTrouble as error:
                raise EngineRefusal(str(error), granted_count) from error

    def stop(self, name: str, *, at_once: bool) -> None:
        is_running = self.workers().get(name) == WorkerState.RUNNING
        # A job that waits has nothing to finish.
        how = ["--signal=TERM", "--batch"] if is_running and not at_once else []
        _run(["scancel", *how, f"--name={name}", f"--user={_user()}"])

    def workers(self) -> dict[str, WorkerState]:
        lines = _run(["squeue", "--noheader", "--format=%j %T", f"--user={_user()}"]).splitlines()
        found: dict[str, WorkerState] = {}
        for line in lines:
            name, _, state = line.strip().rpartition(" ")
            if not name.startswith(self._prefix):
                continue
            if state in _STARTING:
                found[name] = WorkerState.STARTING
            elif state in _RUNNING:
                found[name] = WorkerState.RUNNING
            elif state in _STOPPING:
                found[name] = WorkerState.STOPPING
        return found


def _user() -> str:
    return str(os.getuid())


def _run(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_CALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EngineTrouble(f"{command[0]} has not ended within {_CALL_LIMIT_S:g} s") from error
    except OSError as error:
        raise EngineTrouble(
            f"{command[0]} cannot be run: {error}; the engine slurm needs its commands on PATH"
        ) from error
    if done.returncode != 0:
        raise EngineTrouble(
            f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:500]}"
        )
    return done.stdout
