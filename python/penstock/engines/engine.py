# SPDX-License-Identifier: Apache-2.0
"""What an engine can do: start workers, stop them, and say which there are.

An engine keeps no state of its own: what `workers` says follows from what really runs, so that an
adapter that was killed finds every worker again. Names are made by the adapter, and no name is
used twice.
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

NAME_VARIABLE = "PENSTOCK_WORKER_NAME"  # tells a worker the name that its engine knows it by
WORKER_NAME = re.compile(r"pk-[0-9a-f]+-[0-9]+")  # of the pool and the worker's number


class WorkerState(enum.IntEnum):
    """The numbers are those of the wire's `EngineWorker`."""

    STARTING = 0
    RUNNING = 1
    STOPPING = 2


class EngineRefusal(Exception):
    """The engine grants no more workers now. Says why, and how many it has granted."""

    def __init__(self, reason: str, granted_count: int = 0) -> None:
        super().__init__(reason)
        self.granted_count = granted_count


class EngineTrouble(Exception):
    """The engine cannot be asked: it does not answer, or what it answers makes no sense."""


@dataclass(frozen=True)
class WorkerCommand:
    """How a worker of the pool is started."""

    controller: str
    key_folder: str | None
    patience_s: float
    grace_s: float = DRAIN_GRACE_S  # to finish its batches in, once it is to leave
    isolation: Sequence[str] = ()  # arguments that say what its jobs are kept from

    def arguments(self) -> list[str]:
        keys = [] if self.key_folder is None else ["--keys", self.key_folder]
        grace_s = max(1.0, self.grace_s)  # the engine ends it, where it is to have none
        return [
            sys.executable, "-m", "penstock", "worker", "--controller", self.controller,
            "--patience", f"{self.patience_s:g}", "--grace", f"{grace_s:g}", *keys,
            *self.isolation,
        ]  # fmt: skip


class Engine(Protocol):
    """Confined to one thread at a time. Each call may block, for a bounded time at best."""

    title: str  # its name, for people

    def spawn(self, names: Sequence[str]) -> None:
        """Starts a worker of each name, in this order. Raises EngineRefusal where it does not start
        all of them, and EngineTrouble."""

    def stop(self, name: str, *, at_once: bool) -> None:
        """Has the worker finish its batches and leave, or ends it at once. Does nothing for one
        that has ended. Raises EngineTrouble."""

    def workers(self) -> dict[str, WorkerState]:
        """The workers of this pool that have not ended, by name. Raises EngineTrouble."""
        ...

    def last_words(self, name: str) -> str:
        """The last line that the worker wrote to its log; empty where the engine has none. Raises
        nothing."""
        ...


def private_file(path: str, flags: int) -> int:
    """An opener, of a file that no other user reads."""
    return os.open(path, flags, 0o600)


def make_log_folder(folder: Path) -> None:
    """No other user reads what datasets print."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


_LAST_BYTES = 4096


def last_line(path: Path) -> str:
    """The last line of a text file that is not empty; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
