# SPDX-License-Identifier: Apache-2.0
"""``penstock worker``: starts the worker processes of one host, and starts again those that die.

The processes import torch. This one, which looks after them, does not.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from penstock.pool.code_folder import CodeFolder
from penstock.pool.pool_log import PoolLog
from penstock.pool.worker_spec import USELESS_EXIT_CODE, PoolWorkerSpec

_PAUSE_S = 0.1  # before a process that died is started again; doubled each time
_PAUSE_S_MAX = 5.0
_LIVED_LONG_S = 30.0  # then the next pause is a short one again
# As the parent was found, its process would find modules, whatever the folder it is in.
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.worker_process import run_child
sys.exit(run_child(json.loads(sys.argv[2])))
"""


class Supervisor:
    """The processes of one ``penstock worker``. Confined to the main thread."""

    def __init__(self, specs: Sequence[PoolWorkerSpec], *, is_quiet: bool = False) -> None:
        """A quiet one says only what needs attention."""
        self._log = PoolLog("penstock worker", is_quiet=is_quiet)
        self._children = [_Child(spec, self._log) for spec in specs]
        self._signal_count = 0
        self._has_failed = False

    def run(self, end_fd: int | None = None, grace_s: float = 0.0) -> int:
        """Blocks until every process has left. Returns the exit code.

        SIGTERM and SIGINT have the processes drain, and a second one ends them at once. When
        ``end_fd`` can be read they drain, too, and those left ``grace_s`` later are killed.
        """
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        }
        try:
            for child in self._children:
                child.start()
            kill_at: float | None = None
            while any(child.is_due for child in self._children):
                if kill_at is not None and time.monotonic() >= kill_at:
                    break
                if self._wait(read_fd, end_fd, kill_at):
                    self._end("the end of the program")
                    end_fd, kill_at = None, time.monotonic() + grace_s
                self._look_after_children()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            for child in self._children:
                child.kill()
            os.close(read_fd)
            os.close(write_fd)
        return int(self._has_failed)

    def _wait(self, read_fd: int, end_fd: int | None, kill_at: float | None) -> bool:
        """Obeys signals. Returns whether ``end_fd`` can be read."""
        due = [child.start_at for child in self._children if child.start_at is not None]
        if kill_at is not None:
            due.append(kill_at)
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        fds = [read_fd] if end_fd is None else [read_fd, end_fd]
        readable, _, _ = select.select(fds, [], [], timeout)
        if read_fd in readable:
            for number in os.read(read_fd, 4096):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._end(signal.Signals(number).name)
        return end_fd in readable

    def _end(self, cause: str) -> None:
        self._signal_count += 1
        self._say_end(cause)
        for child in self._children:
            child.end()

    def _say_end(self, cause: str) -> None:
        count = sum(child.is_due for child in self._children)
        processes, them = ("1 process", "it") if count == 1 else (f"{count} processes", "them")
        if self._signal_count == 1:
            text = f"draining {processes} after {cause}; a second signal ends {them} at once"
        else:
            text = f"ending {processes} at once after a second signal, {cause}"
        self._log.say(text)

    def _look_after_children(self) -> None:
        for child in self._children:
            code = child.poll()
            if code is not None and code != 0 and self._signal_count == 0:
                if code == USELESS_EXIT_CODE:
                    self._has_failed = True
                else:
                    child.schedule(code)
            if child.start_at is not None and child.start_at <= time.monotonic():
                child.start()


class _Child:
    def __init__(self, spec: PoolWorkerSpec, log: PoolLog) -> None:
        self._spec = spec
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._pause_s = _PAUSE_S
        self._code: CodeFolder | None = None
        self.start_at: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether it runs, or must be started."""
        return self._process is not None or self.start_at is not None

    def start(self) -> None:
        """Starts the process; where the system refuses, says so and has it tried again."""
        self.start_at = None
        self._started_at = time.monotonic()
        try:
            self._launch()
        except (OSError, MemoryError) as error:
            self._forget()
            self._start_later(
                f"a process could not be started ({error}); the system has to have memory, process "
                f"numbers and descriptors left, and room for temporary files; another try follows"
            )

    def _launch(self) -> None:
        self._code = CodeFolder()
        spec = replace(self._spec, code_root=self._code.path)
        # A session of its own: Ctrl-C at a terminal is for the parent, which tells it once.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), json.dumps(asdict(spec))],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """The exit code of a process that has ended, once."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._forget()
        return code

    def _forget(self) -> None:
        self._process = None
        if self._code is not None:
            self._code.remove()
            self._code = None

    def schedule(self, code: int) -> None:
        """Has it started again, after a pause."""
        self._start_later(f"a process {_ending(code)}; another one starts")

    def _start_later(self, what: str) -> None:
        if time.monotonic() - self._started_at >= _LIVED_LONG_S:
            self._pause_s = _PAUSE_S
        self.start_at = time.monotonic() + self._pause_s
        self._log.tell(f"{what} in {self._pause_s:g} s")
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def end(self) -> None:
        self.start_at = None
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()


def _ending(code: int) -> str:
    """How a process ended, from its code as subprocess has it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
