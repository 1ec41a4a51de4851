# SPDX-License-Identifier: Apache-2.0
"""Log lines of a pool's processes, for people: time, process, event."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO

_NAME_CHARACTERS_MAX = 200  # of a job's name, which its trainer chooses


class PoolLog:
    """The log of one process. Each line is one write, since several processes share a stream."""

    def __init__(self, name: str, *, is_quiet: bool = False) -> None:
        """``name`` identifies the process, such as "penstock worker 3f2a". A quiet log has only
        problems."""
        self.name = name
        self._is_quiet = is_quiet
        self._host = socket.gethostname()

    def info(self, text: str) -> None:
        """Log normal progress to standard output."""
        if not self._is_quiet:
            self._write(sys.stdout, text)

    def warn(self, text: str) -> None:
        """Log a problem that needs attention to standard error."""
        self._write(sys.stderr, text)

    def note_member(self, line: str, is_failure: bool) -> None:
        """Log a line of a controller about a worker or a trainer."""
        (self.warn if is_failure else self.info)(line)

    def _write(self, stream: TextIO, text: str) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        # A full disk, or a pipe without a reader, must not end the process.
        with contextlib.suppress(OSError):
            stream.write(f"{when} {self.name} on {self._host}: {printable(text)}\n")
            stream.flush()


def printable(text: str) -> str:
    """Return text that another process may have sent, without characters that move a terminal's
    cursor. Indent continuation lines, so that none looks like a separate log line."""
    return "\n    ".join(printable_line(line) for line in text.split("\n"))


def printable_line(text: str) -> str:
    """Return printable text on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short_id(identity: int | str) -> str:
    """Shorten the id of a worker or a trainer for display."""
    text = identity if isinstance(identity, str) else f"{identity:016x}"
    return text[:8]


class _Service(NamedTuple):
    trainer_id: int
    job: str


class JobJournal:
    """The log lines of a pool worker about its jobs: started, refused and finished ones. Each
    change is one line; batches are not logged. The server writes the other lines. Confined to the
    thread that makes batches."""

    def __init__(self, info: Callable[[str], None]) -> None:
        self._log = info
        self._service: _Service | None = None
        self._batch_count = 0

    def note_batch(self, trainer_id: int, job: str) -> None:
        """Call before a batch of this job is made for this trainer."""
        service = _Service(trainer_id, job)
        if service != self._service:
            self.finish()
            self._service, self._batch_count = service, 0
            self._log(f"serves {_format(service)}")
        self._batch_count += 1

    def note_refusal(self, trainer_id: int, reason: str) -> None:
        self.finish()
        self._log(f"refuses trainer {short_id(trainer_id)}: {reason}")

    def finish(self) -> None:
        """Call when no further batch of the job served last will follow."""
        if self._service is None:
            return
        self._log(f"has finished {_format(self._service)}: {_batches(self._batch_count)}")
        self._service = None


def _format(service: _Service) -> str:
    name = service.job
    if len(name) > _NAME_CHARACTERS_MAX:
        name = f"{name[:_NAME_CHARACTERS_MAX]}..."
    return f"{name} of trainer {short_id(service.trainer_id)}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"
