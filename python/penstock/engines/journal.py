# SPDX-License-Identifier: Apache-2.0
"""The facts that an adapter needs after it was killed: the number of the next name, the total time
of the workers, which workers were stopped and when, and the controller's last address.

A journal is a file of JSON lines. A line is on disk before the action that it announces. The last
line may be cut off if the process was killed while writing, or if the disk was full: the next write
then replaces the file by a new one. The journal does not list the existing workers: the engine
does.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from penstock.engines.engine import WORKER_NAME, private_file
from penstock.errors import PenstockError

_LINES_MAX = 4096  # then the file is rewritten


class Journal:
    """The only journal object of its file. Thread-compatible.

    ``trouble`` is the reason if the file lacks facts that this object has; it is empty if the file
    is complete. While it is set, no name is given out. All other operations continue, and
    catch_up() writes them later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.trouble = ""
        self.pool = ""  # the prefix of its workers' names
        self.endpoint = ""  # the controller's last address
        self.next_number = 1
        self.spent_worker_ms = 0
        self.stopped_at: dict[str, float] = {}  # seconds of the system's clock, by name
        self._line_count = 0
        self._read()
        if not self.pool:
            self.pool = f"pk-{os.urandom(5).hex()}"
        self._replace()

    def _read(self) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_bytes().split(b"\n")
        del lines[-1]  # text after the last line end was cut off
        for number, line in enumerate(lines, 1):
            try:
                self._apply(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise PenstockError(
                    f"cannot read the journal {self._path}: line {number} is {line[:80]!r}; if no "
                    "worker of the pool is running, remove the file"
                ) from error

    def _apply(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            raise TypeError("no object")
        if "pool" in entry:
            self.pool = str(entry["pool"])
            if not WORKER_NAME.fullmatch(f"{self.pool}-1"):
                raise ValueError("no pool")
        if "endpoint" in entry:
            self.endpoint = str(entry["endpoint"])
        if "next" in entry:
            self.next_number = int(entry["next"])
        if "spent_ms" in entry:
            self.spent_worker_ms = int(entry["spent_ms"])
        if "stop" in entry:
            self.stopped_at[str(entry["stop"])] = float(entry["at"])
        if "gone" in entry:
            self.stopped_at.pop(str(entry["gone"]), None)

    def take_names(self, count: int) -> list[str]:
        """Return new names that no worker of the pool has had. Return an empty list if they
        cannot be written: a worker whose name is not in the journal would be lost."""
        first = self.next_number
        self.next_number += count
        self._write({"next": self.next_number})
        if self.trouble:
            return []
        return [f"{self.pool}-{number}" for number in range(first, first + count)]

    def note_endpoint(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._write({"endpoint": endpoint})

    def note_stop(self, name: str, at: float) -> None:
        self.stopped_at[name] = at
        self._write({"stop": name, "at": at})

    def note_gone(self, name: str) -> None:
        if self.stopped_at.pop(name, None) is not None:
            self._write({"gone": name})

    def note_spent(self, spent_worker_ms: int) -> None:
        self.spent_worker_ms = spent_worker_ms
        self._write({"spent_ms": spent_worker_ms})

    def catch_up(self) -> None:
        """Write changes that could not be written before, if that is possible now."""
        if self.trouble:
            self._replace()

    def _write(self, entry: dict[str, Any]) -> None:
        # After a failed write, the file may end with half a line.
        if self.trouble or self._line_count >= _LINES_MAX:
            return self._replace()
        try:
            _append(self._path, [entry])
        except OSError as error:
            self._note_trouble(error)
        self._line_count += 1

    def _replace(self) -> None:
        """Write a new file with only the current facts, and replace the old one by it."""
        entries: list[dict[str, Any]] = [
            {"pool": self.pool, "next": self.next_number, "spent_ms": self.spent_worker_ms},
            *([{"endpoint": self.endpoint}] if self.endpoint else []),
            *({"stop": name, "at": at} for name, at in self.stopped_at.items()),
        ]
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            _append(new, entries)
            new.replace(self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            self._note_trouble(error)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        else:
            self.trouble = ""
            self._line_count = len(entries)

    def _note_trouble(self, error: OSError) -> None:
        # The path is last, because a status shows only the start of a long text.
        self.trouble = f"the journal cannot be written ({error.strerror}): {self._path}"


def _append(path: Path, entries: list[dict[str, Any]]) -> None:
    with open(path, "ab", opener=private_file) as file:
        file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
