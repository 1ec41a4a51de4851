# SPDX-License-Identifier: Apache-2.0
"""Control groups of jobs: one per job, below a cgroup v2 folder that the operator has delegated.
They limit the resources of a job and of all processes that it starts, even in another session.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Mapping
from pathlib import Path

_EMPTY_S_MAX = 1.0  # until the killed processes of a group are gone
_NAME = re.compile(r"penstock-(\d+)-\d+")


def controllers_of(folder: str) -> set[str]:
    """Return the controllers available to groups below ``folder``. Raise ValueError if it is not a
    cgroup v2 folder in which groups can be created."""
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
    """Enable these controllers for groups below ``folder``. Raise ValueError if that is refused."""
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
    """The groups of one warm process. Confined to its thread."""

    def __init__(self, folder: str, settings: Mapping[str, str]) -> None:
        """``settings`` maps file names to the text written to these files in each group. Removes
        groups left by warm processes that were killed."""
        self._folder = folder
        self._settings = settings
        self._late: set[str] = set()  # groups that were not empty yet
        for path in Path(folder).iterdir():
            named = _NAME.fullmatch(path.name)
            if named is not None and not os.path.exists(f"/proc/{named[1]}"):
                self._remove(str(path))

    def make(self, job: int) -> str:
        """Create the group of a job. Raise OSError."""
        path = self._path_of(job)
        os.mkdir(path)
        for name, text in self._settings.items():
            Path(path, name).write_text(text)
        return path

    def remove(self, job: int) -> None:
        """Kill the remaining processes of a job and remove its group, if it has one."""
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
    """Move this process into the group. Raise OSError."""
    Path(path, "cgroup.procs").write_text("0")


def _wait_until_empty(path: str) -> None:
    deadline = time.monotonic() + _EMPTY_S_MAX
    with open(f"{path}/cgroup.events", "rb", buffering=0) as events:
        changes = select.poll()
        changes.register(events, select.POLLPRI)  # the system reports each change
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            changes.poll(left_s * 1e3)
