# SPDX-License-Identifier: Apache-2.0
"""Log lines of a pool's processes, for people: time, process, event."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from typing import TextIO


class PoolLog:
    """The log of one process. Each line is one write, since several processes share a stream."""

    def __init__(self, name: str, *, is_quiet: bool = False) -> None:
        """``name`` identifies the process, such as "penstock worker 3f2a". A quiet log has only
        problems."""
        self.name = name
        self._is_quiet = is_quiet
        self._host = socket.gethostname()

    def say(self, text: str) -> None:
        """Log normal progress to standard output."""
        if not self._is_quiet:
            self._write(sys.stdout, text)

    def tell(self, text: str) -> None:
        """Log a problem that needs attention to standard error."""
        self._write(sys.stderr, text)

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
