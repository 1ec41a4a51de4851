# SPDX-License-Identifier: Apache-2.0
"""The control groups of jobs: one for each job, below a folder of cgroup v2 that the operator has
delegated. They bound what a job takes with all that it starts, also what leaves its session.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Mapping
from pathlib import Path

_EMPTY_S_MAX = 1.0  # for the killed processes of a group to be gone
_NAME = re.compile(r"penstock-(\d+)-\d+")


def controllers_of(folder: str) -> set[str]:
    """The controllers that groups below ``folder`` can have. Raises ValueError where it is no
    folder of cgroup v2 in which groups can be made."""
    try:
        names = Path(folder, "cgroup.controllers").read_text().split()
    except OSError as error:
        raise ValueError(
            f"--job-group must be a folder of cgroup v2, got {folder} ({error.strerror}); make one "
            f"below /sys/fs/cgroup, or have systemd delegate one (Delegate=yes)"
        ) from None
    if not os.access(folder, os.W_OK) or not os.access(f"{folder}/cgroup.procs", os.W_OK):
        raise ValueError(
            f"--job-group must be a folder that this account may write, got {folder}; delegate it "
            f"(Delegate=yes of a systemd unit, or chown it and its cgroup.procs)"
        )
    return set(names)


def enable(folder: str, controllers: set[str]) -> None:
    """Has groups below ``folder`` have these. Raises ValueError where that is refused."""
    try:
        if controllers:
            text = " ".join(f"+{name}" for name in sorted(controllers))
            Path(folder, "cgroup.subtree_control").write_text(text)
        trial = os.path.join(folder, f"penstock-{os.getpid()}-0")
        os.mkdir(trial)
        os.rmdir(trial)
    except OSError as error:
        raise ValueError(
            f"--job-group must be a folder in which groups can be made, got {folder} "
            f"({error.strerror}); it must have no process of its own, and be delegated to this "
            f"account"
        ) from None


class JobGroups:
    """Those of one warm process. Confined to its thread."""

    def __init__(self, folder: str, settings: Mapping[str, str]) -> None:
        """``settings`` are files of each group, and what is written to them. Removes groups that a
        warm process that was killed has left."""
        self._folder = folder
        self._settings = settings
        self._late: set[str] = set()  # groups that were not empty yet
        for path in Path(folder).iterdir():
            named = _NAME.fullmatch(path.name)
            if named is not None and not os.path.exists(f"/proc/{named[1]}"):
                self._remove(str(path))

    def make(self, job: int) -> str:
        """Makes the group of a job. Raises OSError."""
        path = self._path_of(job)
        os.mkdir(path)
        for name, text in self._settings.items():
            Path(path, name).write_text(text)
        return path

    def remove(self, job: int) -> None:
        """Ends what is left of a job, and removes its group; does nothing where there is none."""
        self._remove(self._path_of(job))
        for path in list(self._late):
            self._remove(path)

    def _path_of(self, job: int) -> str:
        return os.path.join(self._folder, f"penstock-{os.getpid()}-{job}")

    def _remove(self, path: str) -> None:
        self._late.discard(path)
        with contextlib.suppress(OSError):
            Path(path, "cgroup.kill").write_text("1")  # from Linux 5.14
        try:
            _wait_until_empty(path)
            os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError:
            self._late.add(path)


def join(path: str) -> None:
    """Moves this process into the group. Raises OSError."""
    Path(path, "cgroup.procs").write_text("0")


def _wait_until_empty(path: str) -> None:
    deadline = time.monotonic() + _EMPTY_S_MAX
    with open(f"{path}/cgroup.events", "rb", buffering=0) as events:
        changes = select.poll()
        changes.register(events, select.POLLPRI)  # the system tells of each change
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            changes.poll(left_s * 1e3)
