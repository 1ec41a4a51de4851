# SPDX-License-Identifier: Apache-2.0
"""How the processes of jobs reach named hosts, and those alone: each has a network namespace of its
own, and in it an HTTP proxy at 127.0.0.1 as the only way out.

The process of a job makes the socket at which the proxy listens, since it is in the namespace, and
hands it to the process of the proxy (job_proxy.py), which is outside, before it runs any code of
the job. The proxy serves all jobs of one warm process, knows them by their numbers, has no key, and
ends with the warm process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# Of each job's namespace, in which nobody else listens.
_PORT = 3128
_BACKLOG = 128
_END_S_MAX = 2.0
_SETTINGS = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_NO_SETTINGS = ("NO_PROXY", "no_proxy")
# What crosses to the proxy: whether the job begins, with its socket, or is over; and its number.
MESSAGE = struct.Struct("=?Q")

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.job_proxy import run_proxy
run_proxy(json.loads(sys.argv[2]), int(sys.argv[3]))
"""


class ProxyProcess:
    """The process of the proxy, as its warm process has it. Confined to its thread."""

    def __init__(self, isolation: Mapping[str, Any]) -> None:
        """Starts it. ``isolation`` is of a JobIsolation. Raises OSError.

        To be called before there is a WarmChannel, which ends children that others have started.
        """
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            paths, settings = json.dumps(sys.path), json.dumps(isolation)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, paths, settings, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    @property
    def fd(self) -> int:
        """For `enter_job`. It is closed in other programs."""
        return self._own.fileno()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends it."""
        self._own.close()
        try:
            self._process.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close_in_child(self) -> None:
        """In the process of a job, which closes `fd` itself."""
        self._own.detach()

    def end(self, job: int) -> None:
        """Ends what a job has open, and so its namespace."""
        with contextlib.suppress(OSError):  # it has ended, and so have all connections
            self._own.send(MESSAGE.pack(False, job), socket.MSG_DONTWAIT)


def enter_job(proxy_fd: int, job: int) -> None:
    """Has the proxy serve this process, which has loopback alone, and has programs use it. Closes
    ``proxy_fd``. Raises OSError."""
    with socket.socket(fileno=proxy_fd) as proxy, socket.socket() as listener:
        listener.bind(("127.0.0.1", _PORT))
        listener.listen(_BACKLOG)
        socket.send_fds(proxy, [MESSAGE.pack(True, job)], [listener.fileno()])
    for name in _SETTINGS:
        os.environ[name] = f"http://127.0.0.1:{_PORT}"
    for name in _NO_SETTINGS:  # of the worker's own network
        os.environ[name] = ""
