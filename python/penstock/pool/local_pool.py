# SPDX-License-Identifier: Apache-2.0
"""``penstock run --pool-local``: the pool that a program starts on its own machine.

A separate process, the *keeper* (`run_local_pool`), runs the controller and supervises the workers.
It is not a child of the program, because a program that waits for all of its children must not find
one that it never started. The keeper ends when the program ends, for any reason, and on SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass

from penstock import _pool
from penstock.errors import PenstockError
from penstock.pool.worker_spec import PATIENCE_S, PoolWorkerSpec
from penstock.pool.worker_supervisor import Supervisor

_START_S_MAX = 60.0
_GRACE_S = 5.0  # for workers to leave after the end of the program that they served
_END_S_MAX = _GRACE_S + 5.0  # includes a second signal; then the keeper is killed
# The keeper gets this process's module path, so it finds modules in any folder. Its parent exits as
# soon as the keeper has been forked.
_PROGRAM = """\
import json, os, sys
if os.fork():
    os._exit(0)
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.local_pool import run_local_pool
sys.exit(run_local_pool(json.loads(sys.argv[2])))
"""
_LOOPBACK = "tcp://127.0.0.1:0"


class LocalPool:
    """The pool of this process, which must finally call :meth:`end`. Confined to the main
    thread."""

    def __init__(self, endpoint: str, pool_pidfd: int, alive_fd: int) -> None:
        self.endpoint = endpoint
        self._pool_pidfd = pool_pidfd
        self._alive_fd = alive_fd
        self._owner_pid = os.getpid()

    @classmethod
    def start(cls, worker_count: int, key_folder: str | None) -> LocalPool:
        """Start the pool. Return when the controller listens; workers may still be starting. Raise
        PenstockError if the controller cannot start."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, read_fd)
            own_fd = os.pidfd_open(os.getpid())
            try:
                orders = asdict(LocalPoolSettings(worker_count, key_folder, own_fd, write_fd))
                # A separate session, so that Ctrl-C at a terminal reaches only the program.
                subprocess.run(
                    [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), json.dumps(orders)],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(own_fd, write_fd),
                    check=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise PenstockError(
                    f"the pool process could not be started ({error}); the system must have "
                    f"memory, process numbers and descriptors left"
                ) from error
            finally:
                os.close(own_fd)
                os.close(write_fd)
            report = _read_report(read_fd)
            pool_pidfd = os.pidfd_open(report.pid)
            stack.callback(os.close, pool_pidfd)
            # The other side keeps the pipe open while the keeper lives: the descriptor opened above
            # refers to the keeper, and not to a later process with the same id.
            if select.select([read_fd], [], [], 0)[0]:
                raise _no_start("it has ended")
            stack.pop_all()
        return cls(report.endpoint, pool_pidfd, read_fd)

    def end(self) -> None:
        """End the pool's processes and wait for them; the time is bounded even if a worker's
        dataset hangs. Do nothing in a process that the program has forked."""
        if os.getpid() != self._owner_pid or self._pool_pidfd < 0:
            return
        for number, wait_s in (
            (signal.SIGTERM, _GRACE_S),
            (signal.SIGTERM, _END_S_MAX - _GRACE_S),
            (signal.SIGKILL, None),
        ):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pool_pidfd, number)
            if select.select([self._pool_pidfd], [], [], wait_s)[0]:
                break
        os.close(self._pool_pidfd)
        os.close(self._alive_fd)
        self._pool_pidfd = -1


def _read_report(read_fd: int) -> LocalPoolReport:
    """Read the keeper's report that its controller listens. Raise PenstockError without one."""
    deadline = time.monotonic() + _START_S_MAX
    text = b""
    while not text.endswith(b"\n"):
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([read_fd], [], [], left_s)[0]:
            raise _no_start(f"it sent no report for {_START_S_MAX:g} s")
        if not (piece := os.read(read_fd, 4096)):
            raise _no_start("it has ended")
        text += piece
    report = LocalPoolReport(**json.loads(text))
    if report.refusal:
        raise PenstockError(report.refusal)
    return report


def _no_start(seen: str) -> PenstockError:
    return PenstockError(
        f"the pool process did not start: {seen}; its output shows the reason, unless the system "
        f"was out of memory or process numbers"
    )


@dataclass(frozen=True, slots=True)
class LocalPoolSettings:
    worker_count: int
    key_folder: str | None  # None: the keys that this user's processes share
    program_fd: int  # a descriptor of the program's process
    report_fd: int  # for one report; open for as long as the keeper lives


@dataclass(frozen=True, slots=True)
class LocalPoolReport:
    """A report that the controller listens, or why there is no pool."""

    pid: int
    endpoint: str = ""
    refusal: str = ""

    def write(self, fd: int) -> None:
        os.write(fd, json.dumps(asdict(self)).encode() + b"\n")


def run_local_pool(settings: dict[str, object]) -> int:
    """Run the pool that a `LocalPoolSettings` describes; return the exit code."""
    orders = LocalPoolSettings(**settings)  # type: ignore[arg-type]
    for fd in (orders.program_fd, orders.report_fd):
        os.set_inheritable(fd, False)
    _pool.raise_descriptor_limit()
    try:
        controller = _pool.Controller.start(_LOOPBACK, orders.key_folder)
        spec = PoolWorkerSpec(
            bind=_LOOPBACK,
            advertised=None,
            data_bind=None,
            data_advertised=None,
            controller=controller.endpoint,
            key_folder=orders.key_folder,
            patience_s=PATIENCE_S,
            parent_pid=os.getpid(),
        )
        supervisor = Supervisor([spec] * orders.worker_count, is_quiet=True)
    except (PenstockError, ValueError, OSError) as error:
        LocalPoolReport(os.getpid(), refusal=str(error)).write(orders.report_fd)
        return 1
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC)
    serving = threading.Thread(target=controller.run, args=(stop_read,))
    serving.start()
    LocalPoolReport(os.getpid(), endpoint=controller.endpoint).write(orders.report_fd)
    try:
        return supervisor.run(end_fd=orders.program_fd, grace_s=_GRACE_S)
    finally:
        os.write(stop_write, b"x")
        serving.join()
