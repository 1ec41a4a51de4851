# SPDX-License-Identifier: Apache-2.0
"""Workers as processes of this machine.

A worker's process is identified by an environment variable, so that any process can find it again,
even if the process that started it has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from penstock.engines.engine import (
    NAME_VARIABLE,
    EngineRefusal,
    WorkerCommand,
    WorkerState,
    last_line,
    make_log_folder,
    private_file,
)

_VARIABLE = NAME_VARIABLE.encode() + b"="


class LocalEngine:
    """An `Engine`. ``prefix`` starts the names of this pool's workers, and no other pool's."""

    title = "local"

    def __init__(self, command: WorkerCommand, prefix: str, log_folder: Path) -> None:
        self._command = command.arguments()
        self._prefix = prefix
        self._log_folder = log_folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: set[str] = set()

    def spawn(self, names: Sequence[str]) -> None:
        variables = {**os.environ}
        variables.pop("PENSTOCK_KEYS", None)  # the operator's folder; workers get another one
        for granted_count, name in enumerate(names):
            try:
                make_log_folder(self._log_folder)
                with open(self._log_folder / f"{name}.log", "ab", opener=private_file) as log:
                    # A separate session: Ctrl-C at the terminal reaches only the adapter.
                    child = subprocess.Popen(
                        self._command,
                        env={**variables, NAME_VARIABLE: name},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
            except OSError as error:
                raise EngineRefusal(
                    f"cannot start a process on this machine: {error}", granted_count
                ) from error
            self._children[name] = child

    def stop(self, name: str, *, at_once: bool) -> None:
        self._stopped.add(name)
        child = self._children.get(name)
        for pid in self._processes().get(name, [child.pid] if child is not None else []):
            try:
                os.kill(pid, signal.SIGKILL if at_once else signal.SIGTERM)
            except ProcessLookupError:
                continue

    def workers(self) -> dict[str, WorkerState]:
        self._children = {
            name: child for name, child in self._children.items() if child.poll() is None
        }
        # The environment of a process that has just started cannot be read yet.
        names = self._processes().keys() | self._children.keys()
        self._stopped &= names
        return {
            name: WorkerState.STOPPING if name in self._stopped else WorkerState.RUNNING
            for name in names
        }

    def last_log_line(self, name: str) -> str:
        return last_line(self._log_folder / f"{name}.log")

    def _processes(self) -> dict[str, list[int]]:
        """Return, by name, the processes that were not started by another process of the name."""
        found: dict[int, tuple[str, int]] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal() and (name := _name_of(entry.path, self._prefix)):
                parent = _parent_of(entry.path)
                if parent is not None:
                    found[int(entry.name)] = (name, parent)
        result: dict[str, list[int]] = {}
        for pid, (name, parent) in found.items():
            # A worker's server, which has its keys, lets only root read its environment.
            above = parent if parent in found else _parent_of(f"/proc/{parent}")
            if found.get(above or 0, ("", 0))[0] != name:
                result.setdefault(name, []).append(pid)
        return result


def _name_of(folder: str, prefix: str) -> str | None:
    try:
        with open(f"{folder}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # it belongs to another user, or has ended
        return None
    for variable in variables:
        if variable.startswith(_VARIABLE):
            name = variable[len(_VARIABLE) :].decode(errors="replace")
            return name if name.startswith(prefix) else None
    return None


def _parent_of(folder: str) -> int | None:
    """Return the parent process id; None if the process has ended, even as a zombie whose parent
    has not read its exit code yet."""
    try:
        with open(f"{folder}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(parent)
