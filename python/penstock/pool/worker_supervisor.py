# SPDX-License-Identifier: Apache-2.0
"""``penstock worker``: start the workers of one host, and restart them if they end without having
been stopped.

They consist of several processes: one server, a program without Python and torch, which has the
keys and sockets of all workers; one warm process, which the server starts and from which it has one
process forked for each job; and these job processes. The supervisor monitors the server. A server
reports over a pipe why it ends, and which of its workers have left before
(csrc/base/child_process.h); its exit code is only logged.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import _pool
from penstock.errors import PenstockError, SharedMemoryError
from penstock.pool.job_code import CodeFolder
from penstock.pool.job_isolation import IsolationOptions, JobIsolation, plan_isolation
from penstock.pool.pool_log import PoolLog
from penstock.pool.worker_spec import PoolWorkerSpec, arena_bytes, job_bytes

_PAUSE_S = 0.1  # before an ended process is restarted; doubled each time
_PAUSE_S_MAX = 5.0
_STABLE_S = 30.0  # after that, the next pause is short again
# Until a server is killed that has reported its end or has used up its grace period. It may have to
# wait for job processes.
_EXIT_S_MAX = 10.0
_STRAYS_S_MAX = 1.0  # until the remaining processes of a killed server have ended
# The warm process gets the parent's module path, so it finds modules in any folder. The server
# appends the descriptor of its channel to the arguments. The process exits without cleanup, since
# the system is faster at it.
_WARM_PROGRAM = """\
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.warm_process import run_warm
os._exit(run_warm(json.loads(sys.argv[2]), int(sys.argv[3])))
"""


class Supervisor:
    """The workers of one ``penstock worker``. Confined to the main thread."""

    def __init__(
        self,
        specs: Sequence[PoolWorkerSpec],
        *,
        is_quiet: bool = False,
        isolation: JobIsolation | None = None,
    ) -> None:
        """``specs`` differ only in their addresses. A quiet supervisor and its workers log only
        problems. Raises as `ServerProgram`, which documents the default of ``isolation``."""
        self._log = PoolLog("penstock worker", is_quiet=is_quiet)
        program = ServerProgram(is_quiet=is_quiet, isolation=isolation)
        self._server = _Server(specs, program, self._log)
        self._signal_count = 0
        self._has_failed = False
        self._strays: _pool.StrayProcesses | None = None  # once it runs

    def run(self, end_fd: int | None = None, grace_s: float = 0.0) -> int:
        """Block until the workers have left. Return the exit code.

        SIGTERM and SIGINT make the workers drain, each within the grace period of its spec; a
        second signal ends them immediately. When ``end_fd`` is readable, they drain within
        ``grace_s``.
        """
        self._strays = _pool.StrayProcesses()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        }
        try:
            self._server.start()
            while self._server.is_due:
                if self._wait(read_fd, end_fd):
                    self._end("the end of the program", grace_s)
                    end_fd = None
                self._check_server()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._server.kill()
            self._end_strays()
            os.close(read_fd)
            os.close(write_fd)
        return int(self._has_failed)

    def _wait(self, signal_fd: int, end_fd: int | None) -> bool:
        """Wait, and handle signals. Return whether ``end_fd`` is readable."""
        due_at = self._server.due_at
        timeout_s = None if due_at is None else max(0.0, due_at - time.monotonic())
        waiting = select.poll()  # select() takes no descriptor above 1,023
        for fd in (signal_fd, end_fd, self._server.pipe_fd):
            if fd is not None:
                waiting.register(fd, select.POLLIN)
        readable = {
            fd for fd, _ in waiting.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3))
        }
        if signal_fd in readable:
            for number in os.read(signal_fd, 4096):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._end(signal.Signals(number).name)
        return end_fd in readable

    def _end(self, cause: str, grace_s: float | None = None) -> None:
        self._signal_count += 1
        count = self._server.worker_count
        workers, them = ("1 worker", "it") if count == 1 else (f"{count} workers", "them")
        if self._signal_count == 1:
            self._log.info(
                f"draining {workers} after {cause}; a second signal ends {them} immediately"
            )
            self._server.end(grace_s)
        else:
            self._log.info(f"ending {workers} immediately after a second signal, {cause}")
            self._server.end_at_once()

    def _check_server(self) -> None:
        end = self._server.poll()
        if end is not None:
            self._end_strays()
            self._take(end)
        self._server.kill_if_late()
        if self._server.start_at is not None and self._server.start_at <= time.monotonic():
            self._server.start()

    def _end_strays(self) -> None:
        """End the stray processes of an ended server; a running server adopts its orphans."""
        pid = self._server.pid
        if self._strays is not None:
            self._strays.end_all_but([] if pid is None else [pid], _STRAYS_S_MAX)

    def _take(self, end: _End) -> None:
        if self._signal_count > 0 or end.is_drained:
            if end.has_reason:
                self._log.warn(end.how)
        elif end.is_final:
            self._has_failed = True
        else:
            self._server.schedule(end.how)


@dataclass(frozen=True, slots=True)
class _End:
    """How a server has ended."""

    how: str  # for people
    has_reason: bool  # whether ``how`` includes a report by the server
    is_drained: bool  # its workers were instructed to leave the pool
    is_final: bool  # another server would fail in the same way


class _Server:
    def __init__(
        self, specs: Sequence[PoolWorkerSpec], program: ServerProgram, log: PoolLog
    ) -> None:
        self._specs = list(specs)  # of workers that have not left
        self._program = program
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: _pool.ExitPipe | None = None  # of the process
        self._is_pipe_open = False
        self._has_served = False  # at least one of its earlier processes
        self._started_at = 0.0
        self._pause_s = _PAUSE_S
        self._code: CodeFolder | None = None
        self._kill_at: float | None = None
        self.start_at: float | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_due(self) -> bool:
        """Whether it is running or must be started."""
        return self._process is not None or self.start_at is not None

    @property
    def due_at(self) -> float | None:
        """The time of the next action; None if there is none."""
        return min((at for at in (self.start_at, self._kill_at) if at is not None), default=None)

    @property
    def worker_count(self) -> int:
        """The number of workers that have not left."""
        left = self._pipe.left if self._pipe is not None else ()
        return len(self._specs) - len(left)

    @property
    def pipe_fd(self) -> int | None:
        """A descriptor that is readable when the process has reported something."""
        return self._pipe.read_fd if self._pipe is not None and self._is_pipe_open else None

    def start(self) -> None:
        """Start the process; if the system refuses, log that and schedule another attempt."""
        self.start_at = None
        self._started_at = time.monotonic()
        try:
            self._launch()
        except (OSError, MemoryError, SharedMemoryError) as error:
            self._forget()
            self._start_later(
                f"a process could not be started ({error}); the system must have memory, process "
                f"numbers and descriptors left, and room for temporary files; retrying"
            )

    def _launch(self) -> None:
        self._code = CodeFolder()
        self._pipe = _pool.ExitPipe.open()
        self._is_pipe_open = True
        exit_fd = self._pipe.write_fd
        # A separate session: Ctrl-C at a terminal reaches the parent, which signals it once.
        self._process = subprocess.Popen(
            self._program.command(self._specs, self._code.path, exit_fd),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(exit_fd,),
        )
        self._pipe.close_write()

    def poll(self) -> _End | None:
        """Return how the process ended; only once, after it has ended."""
        if self._process is None or self._pipe is None:
            return None
        code = self._process.poll()  # its report is in the pipe by then
        had_reported = self._pipe.end is not None
        # A process that it has started may still be alive and keep the pipe open.
        self._is_pipe_open = self._pipe.read()
        if self._pipe.end is not None and not had_reported:
            self._kill_within(_EXIT_S_MAX)
        if code is None:
            return None
        word, text = self._pipe.end, self._pipe.text
        has_served_itself = self._pipe.has_served
        end = _End(
            how=f"a process {_ending(code)}{': ' if text else ''}{text}",
            has_reason=bool(text),
            is_drained=word == "drained",
            # If a server has served before, the reason may be a port that is not free yet.
            is_final=word == "useless" and (has_served_itself or not self._has_served),
        )
        self._has_served = self._has_served or has_served_itself
        left = self._pipe.left
        staying = [spec for place, spec in enumerate(self._specs) if place not in left]
        self._forget()
        self._specs = staying or self._specs  # all have left only if the server ended as instructed
        return end

    def _forget(self) -> None:
        self._process = self._pipe = self._kill_at = None
        if self._code is not None:
            self._code.remove()
            self._code = None

    def schedule(self, how: str) -> None:
        """Restart it after a pause."""
        self._start_later(f"{how}; another one starts")

    def _start_later(self, what: str) -> None:
        if time.monotonic() - self._started_at >= _STABLE_S:
            self._pause_s = _PAUSE_S
        self.start_at = time.monotonic() + self._pause_s
        self._log.warn(f"{what} in {self._pause_s:g} s")
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def end(self, grace_s: float | None = None) -> None:
        """Drain it within ``grace_s``, after which it is killed; None: within the grace period of
        its spec, and some time for its exit."""
        self.start_at = None
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        if grace_s is None:
            grace_s = self._specs[0].grace_s + _EXIT_S_MAX
        self._kill_within(grace_s)

    def _kill_within(self, seconds: float) -> None:
        """Schedule a kill, unless an earlier one is scheduled."""
        self._kill_at = min(time.monotonic() + seconds, self._kill_at or math.inf)

    def end_at_once(self) -> None:
        self.start_at = None
        if self._process is not None:
            self._process.kill()

    def kill_if_late(self) -> None:
        """Kill the process if it should have ended by now."""
        if self._process is None or self._kill_at is None:
            return
        if time.monotonic() >= self._kill_at:
            self._log.info(f"process {self._process.pid} did not exit in time and is killed")
            self._process.kill()
            self._kill_at = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()


def _ending(code: int) -> str:
    """Describe how a process ended, from its exit code as subprocess returns it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


class ServerProgram:
    """The program, and the settings that all servers of one supervisor share."""

    def __init__(self, *, is_quiet: bool, isolation: JobIsolation | None = None) -> None:
        """A quiet worker logs only problems. Without ``isolation``, jobs are isolated from the
        keys if possible. Raises PenstockError if the program is missing, and ValueError if an
        environment variable for a memory cap is invalid."""
        self._path = _path_of_program()
        self._is_quiet = is_quiet
        self._isolation = isolation
        self._caps = {"arena-bytes": arena_bytes(), "blob-bytes": job_bytes()}

    def command(self, specs: Sequence[PoolWorkerSpec], code_root: str, exit_fd: int) -> list[str]:
        """Return the command of a server with a worker for each of ``specs``, which differ only in
        their addresses. ``code_root`` is a folder for the modules of jobs, which the caller
        removes; ``exit_fd`` is the write end of its ExitPipe."""
        addresses = [
            (name, value)
            for spec in specs
            for name, value in (
                ("bind", spec.bind),
                ("advertised", spec.advertised),
                ("data-bind", spec.data_bind),
                ("data-advertised", spec.data_advertised),
            )
        ]
        spec = specs[0]
        options = {
            "controller": spec.controller,
            "keys": spec.key_folder,
            "name": spec.name,
            "powercap": spec.powercap,
            "patience": spec.patience_s,
            "grace": spec.grace_s,
            "parent": spec.parent_pid,
            "exit-fd": exit_fd,
            "quiet": int(self._is_quiet),
            **self._caps,
        }
        given = (
            f"--{name}={value}"
            for name, value in (*addresses, *options.items())
            if value is not None
        )
        if self._isolation is None:
            self._isolation = plan_isolation(IsolationOptions(), spec.key_folder).isolation
        # Kept batches are shared with the servers of this machine whose jobs see the same.
        installation = json.dumps([sys.executable, sys.path, self._isolation.fields()])
        of_warm = {
            "code_root": code_root,
            "is_quiet": self._is_quiet,
            "isolation": self._isolation.fields(),
        }
        warm = (sys.executable, "-c", _WARM_PROGRAM, json.dumps(sys.path), json.dumps(of_warm))
        return [str(self._path), *given, f"--installation={installation}", "--", *warm]


def _path_of_program() -> Path:
    assert _pool.__file__ is not None
    path = Path(_pool.__file__).with_name("penstock-server")
    if not os.access(path, os.X_OK):
        raise PenstockError(
            f"the program that serves trainers of a pool, {path}, is missing or cannot be run; "
            f"reinstall penstock, or rebuild it in a source tree"
        )
    return path
