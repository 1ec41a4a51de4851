# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine: start workers, stop them, and list them.

An engine has no separate state: the result of `workers` depends only on the workers that really
run, so that an adapter that was killed finds every worker again. The adapter chooses the names, and
uses each name only once.
"""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.pool.worker_spec import DRAIN_GRACE_S

NAME_VARIABLE = "PENSTOCK_WORKER_NAME"  # passes to a worker the name that its engine uses
WORKER_NAME = re.compile(r"pk-[0-9a-f]+-[0-9]+")  # of the pool and the worker's number


class WorkerState(enum.IntEnum):
    """The numbers are the values of the wire's `EngineWorker`."""

    STARTING = 0
    RUNNING = 1
    STOPPING = 2


class EngineRefusal(Exception):
    """The engine grants no more workers now. Has the reason, and how many it has granted."""

    def __init__(self, reason: str, granted_count: int = 0) -> None:
        super().__init__(reason)
        self.granted_count = granted_count


class EngineError(Exception):
    """The engine cannot be queried: it does not answer, or its answer is not understood."""


@dataclass(frozen=True)
class WorkerCommand:
    """The command that starts a pool worker."""

    controller: str
    key_folder: str | None
    patience_s: float
    grace_s: float = DRAIN_GRACE_S  # for finishing its batches, once it is to leave
    isolation: Sequence[str] = ()  # arguments for the isolation of its jobs

    def arguments(self) -> list[str]:
        keys = [] if self.key_folder is None else ["--keys", self.key_folder]
        grace_s = max(1.0, self.grace_s)  # with a grace of 0, the engine ends it
        return [
            sys.executable, "-m", "penstock", "worker", "--controller", self.controller,
            "--patience", f"{self.patience_s:g}", "--grace", f"{grace_s:g}", *keys,
            *self.isolation,
        ]  # fmt: skip


class Engine(Protocol):
    """Used by one thread at a time. Each call may block, at best for a bounded time."""

    title: str  # its name, for people

    def spawn(self, names: Sequence[str]) -> None:
        """Start a worker for each name, in this order. Raise EngineRefusal if not all of them are
        started, or EngineError."""

    def stop(self, name: str, *, at_once: bool) -> None:
        """Have the worker finish its batches and leave, or end it immediately. A worker that has
        ended is ignored. Raise EngineError."""

    def workers(self) -> dict[str, WorkerState]:
        """Return this pool's workers that have not ended, by name. Raise EngineError."""
        ...

    def last_log_line(self, name: str) -> str:
        """Return the last line of the worker's log; "" if the engine has none. Never raise."""
        ...


def private_file(path: str, flags: int) -> int:
    """Open a file that other users cannot read. For use as an opener."""
    return os.open(path, flags, 0o600)


def make_log_folder(folder: Path) -> None:
    """Create the log folder; other users cannot read it, since it has the output of datasets."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


_LAST_BYTES = 4096


def last_line(path: Path) -> str:
    """Return the last line of a text file that is not empty; "" if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
