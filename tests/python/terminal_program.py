# SPDX-License-Identifier: Apache-2.0
"""A program on a separate terminal, whose screen a test reads and whose keys it presses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

SECONDS_MAX = 60.0

KEYS = {
    "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D", "page down": "\x1b[6~",
    "page up": "\x1b[5~", "f1": "\x1b[[A", "f3": "\x1b[[C", "f4": "\x1b[[D", "f5": "\x1b[[E",
    "f6": "\x1b[17~", "f10": "\x1b[21~", "escape": "\x1b", "back tab": "\x1b\t",
}  # fmt: skip


def _without_a_size(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables for the size that a test runner may set: programs trust them more than
    their terminal."""
    return {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}


class TerminalProgram:
    """A program with TERM=linux, which pyte emulates."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        columns: int = 120,
        lines: int = 30,
    ) -> None:
        self._master, slave = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._set_size(columns, lines)
        self.settings = termios.tcgetattr(slave)
        self._slave = slave  # kept, so that the settings can be read after the end
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={"TERM": "linux", **_without_a_size(environment)},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def press(self, *keys: str) -> None:
        """Press keys, given by names of KEYS, or type texts."""
        for key in keys:
            os.write(self._master, KEYS.get(key, key).encode())

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        with contextlib.suppress(OSError):
            self._stream.feed(os.read(self._master, 65536))
            return True
        return False

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def style_at(self, words: str) -> pyte.screens.Char:
        """Return the style of the first character of these words."""
        for number, line in enumerate(self._screen.display):
            if (column := line.find(words)) >= 0:
                found: pyte.screens.Char = self._screen.buffer[number][column]
                return found
        raise AssertionError(f"{words!r} is not on the screen:\n{self.text}")

    def wait(self, is_so: Callable[[str], bool]) -> str:
        """Wait until the screen meets a condition; return it."""
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            while self._read(0.05):
                if is_so(self.text):
                    return self.text
            if is_so(self.text):
                return self.text
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text}"
            assert time.monotonic() < deadline, self.text

    def wait_for(self, words: str) -> str:
        return self.wait(lambda text: words in text)

    def end(self, number: int | None = None) -> int:
        """Wait for its end, after a signal if one is given; return the exit code."""
        if number is not None:
            self.process.send_signal(number)
        deadline = time.monotonic() + SECONDS_MAX
        while self.process.poll() is None:
            self._read(0.05)
            assert time.monotonic() < deadline, self.text
        while self._read(0.05):
            pass
        return self.process.returncode

    @property
    def has_cursor(self) -> bool:
        return not self._screen.cursor.hidden

    def is_as_before(self) -> bool:
        """Return whether the terminal is as before the program: its settings and its cursor."""
        return termios.tcgetattr(self._slave) == self.settings and self.has_cursor

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)
