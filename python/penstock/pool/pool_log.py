# SPDX-License-Identifier: Apache-2.0
"""The lines that the processes of a pool leave for people: time, process, event."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from typing import TextIO


class PoolLog:
    """The log of one process. Each line is written in one piece, since several processes share a
    stream."""

    def __init__(self, name: str, *, is_quiet: bool = False) -> None:
        """``name`` names the process, such as "penstock worker 3f2a". A quiet log has trouble
        only."""
        self.name = name
        self._is_quiet = is_quiet
        self._host = socket.gethostname()

    def say(self, text: str) -> None:
        """Good news, on standard output."""
        if not self._is_quiet:
            self._write(sys.stdout, text)

    def tell(self, text: str) -> None:
        """Trouble that somebody should know of, on standard error."""
        self._write(sys.stderr, text)

    def _write(self, stream: TextIO, text: str) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        # A full disk, or a pipe that nobody reads, is no reason to leave.
        with contextlib.suppress(OSError):
            stream.write(f"{when} {self.name} on {self._host}: {printable(text)}\n")
            stream.flush()


def printable(text: str) -> str:
    """Text that may come from another process, without characters that move a terminal's cursor.
    Further lines are indented, so that none passes for a line of the log."""
    return "\n    ".join(printable_line(line) for line in text.split("\n"))


def printable_line(text: str) -> str:
    """Printable text on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short_id(identity: int | str) -> str:
    """How people are shown the id of a worker or a trainer."""
    text = identity if isinstance(identity, str) else f"{identity:016x}"
    return text[:8]
