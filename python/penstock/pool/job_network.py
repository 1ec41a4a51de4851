# SPDX-License-Identifier: Apache-2.0
"""Restrict job processes to named hosts: each has a separate network namespace, in which an HTTP
proxy at 127.0.0.1 is the only way out.

The job process creates the proxy's listening socket, since it is in the namespace, and passes it to
the proxy process (job_proxy.py), which is outside, before it runs any code of the job. The proxy
serves all jobs of one warm process, identifies them by their numbers, has no key, and ends with the
warm process.
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

# In each job's namespace, in which no other program listens.
_PORT = 3128
_BACKLOG = 128
_END_S_MAX = 2.0
_SETTINGS = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_NO_SETTINGS = ("NO_PROXY", "no_proxy")
# Sent to the proxy: whether the job starts (with its socket) or has ended; and its number.
MESSAGE = struct.Struct("=?Q")

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.job_proxy import run_proxy
run_proxy(json.loads(sys.argv[2]), int(sys.argv[3]))
"""


class ProxyProcess:
    """The proxy process, owned by its warm process. Confined to its thread."""

    def __init__(self, isolation: Mapping[str, Any]) -> None:
        """Start the process. ``isolation`` has the fields of a JobIsolation. Raises OSError.

        Call it before a WarmChannel is created, which ends children that others have started.
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
        """The descriptor for `enter_job`. It is closed on exec."""
        return self._own.fileno()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._own.close()
        try:
            self._process.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close_in_child(self) -> None:
        """Call in a job process, which closes `fd` itself."""
        self._own.detach()

    def end(self, job: int) -> None:
        """Close a job's connections, which also releases its namespace."""
        with contextlib.suppress(OSError):  # the proxy has ended, and so have all connections
            self._own.send(MESSAGE.pack(False, job), socket.MSG_DONTWAIT)


def enter_job(proxy_fd: int, job: int) -> None:
    """Have the proxy serve this process, which has only loopback, and configure programs to use it.
    Close ``proxy_fd``. Raise OSError."""
    with socket.socket(fileno=proxy_fd) as proxy, socket.socket() as listener:
        listener.bind(("127.0.0.1", _PORT))
        listener.listen(_BACKLOG)
        socket.send_fds(proxy, [MESSAGE.pack(True, job)], [listener.fileno()])
    for name in _SETTINGS:
        os.environ[name] = f"http://127.0.0.1:{_PORT}"
    for name in _NO_SETTINGS:  # they apply to the worker's network
        os.environ[name] = ""
