# SPDX-License-Identifier: Apache-2.0
"""Python programs in processes that have imported torch and penstock before they begin.

These imports take seconds, so a job of four ranks spent most of its time in them. A nursery is a
process that has imported both, and forks a process for each program, which has separate arguments,
environment and standard error, as in a new interpreter. Programs take turns at two nurseries, since
the hashes of strings, and with them the order of sets, differ between the ranks of a real job.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_REQUEST_BYTES_MAX = 1 << 17
_nurseries: list[_Nursery] = []
_turns = itertools.count()


class WarmProgram:
    """A running program, as ``subprocess.Popen`` with ``stderr=PIPE, text=True``."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        request = {
            "command": list(map(str, command)),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._status_fd, status_fd = os.pipe()
        try:
            start_nurseries()
            nursery = _nurseries[next(_turns) % len(_nurseries)]
            self.pid = nursery.fork(request, [self._stderr.fileno(), status_fd])
        finally:
            os.close(status_fd)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(0.0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait for the end of the process. Return its standard error; empty after the first call.
        Raise subprocess.TimeoutExpired."""
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        if self._stderr.closed:
            return None, ""
        with self._stderr:
            self._stderr.seek(0)
            return None, self._stderr.read().decode(errors="replace")

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status_fd], [], [], timeout)[0]:
            status = os.read(self._status_fd, 64)
            os.close(self._status_fd)
            assert status, "the nursery has ended"
            self.returncode = int(status)
        return self.returncode


def start_nurseries() -> None:
    """Start this process's nurseries if there are none. They end with this process."""
    while len(_nurseries) < 2:
        _nurseries.append(_Nursery())


class _Nursery:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        data = json.dumps(request).encode()
        assert len(data) <= _REQUEST_BYTES_MAX, len(data)
        socket.send_fds(self._channel, [data], fds)
        return int(self._channel.recv(64))


# ---- In the nursery


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request, and report how it ends. Return None when the test process
    has ended, and in a forked process its request."""
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    programs: dict[int, tuple[int, int]] = {}  # by the process's descriptor: its pid, and the pipe
    while True:
        for fd, _ in waiting.poll():
            if fd == channel.fileno():
                data, fds, _, _ = socket.recv_fds(channel, _REQUEST_BYTES_MAX, 2)
                if not data:
                    return None
                stderr_fd, status_fd = fds
                pid = os.fork()
                if pid == 0:
                    os.dup2(stderr_fd, 2)
                    for inherited in (*fds, *(one for _, one in programs.values()), *programs):
                        os.close(inherited)
                    channel.close()
                    request: dict[str, Any] = json.loads(data)
                    return request
                os.close(stderr_fd)
                handle = os.pidfd_open(pid)
                programs[handle] = (pid, status_fd)
                waiting.register(handle, select.POLLIN)
                channel.send(str(pid).encode())
            else:
                pid, status_fd = programs.pop(fd)
                waiting.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                os.write(status_fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(status_fd)


def _run(request: dict[str, Any]) -> None:
    """Run the program in this process, as an interpreter would that is started with it."""
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    tempfile.tempdir = None  # which the imports may have asked for
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if threads := environment.get("OMP_NUM_THREADS"):  # which was read when torch was imported
        torch.set_num_threads(int(threads))
    np.random.seed()
    program, *_ = sys.argv[:] = request["command"]
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(program).parent), *filter(None, added)]
    main = types.ModuleType("__main__")
    main.__file__ = program
    sys.modules["__main__"] = main
    exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)


if __name__ == "__main__":
    import numpy as np
    import torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    import penstock

    penstock.DataLoader, penstock.Packer, penstock.filtered  # noqa: B018
    if (given := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run(given)
