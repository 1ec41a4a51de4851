# SPDX-License-Identifier: Apache-2.0
"""Test by a trial fork whether a process that has imported torch can be forked here.

A library loaded by torch or at startup may keep a forked child from computing: by a handler that it
runs after a fork, or by threads and locks that the child inherits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import signal
import time
import warnings

import torch

SECONDS_MAX = 20.0  # for the child; a busy machine takes one or two
_ELEMENTS = 1 << 17  # enough for torch to use several threads


def fork_fault() -> str | None:
    """Return how a forked child fails to compute with torch, as words that follow "a forked child";
    None if it computes the same as this process. Block for at most `SECONDS_MAX`.

    A fork that the system refuses for the moment is not a fault: the next one may succeed.
    """
    expected = _computed()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        pid = _fork()
        if pid == 0:
            _answer(write_fd)
        os.close(write_fd)
        write_fd = -1
        if pid is None:
            return None
        answer = _read_until(read_fd, time.monotonic() + SECONDS_MAX)
        if answer is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        for fd in (read_fd, write_fd):
            if fd >= 0:
                os.close(fd)
    if answer is None:
        return f"did not compute with torch within {SECONDS_MAX:g} s"
    if status != 0:
        return f"ended while it computed with torch ({_spoken(status)})"
    return None if answer == expected else "computed something else with torch"


def _fork() -> int | None:
    with warnings.catch_warnings():
        # Python warns about forking with threads, which is exactly the case under test.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=re.escape(__name__))
        try:
            return os.fork()
        except (OSError, MemoryError):
            return None


def _answer(write_fd: int) -> None:
    status = 1
    try:
        torch.set_num_threads(2)  # as a dataset may; not in the parent, whose threads no child has
        os.write(write_fd, _computed())
        status = 0
    finally:
        os._exit(status)


def _computed() -> bytes:
    """Compute a hash that is bit-for-bit identical for any number of threads."""
    drawn = torch.rand(64, 64, generator=torch.Generator().manual_seed(1))
    many = torch.arange(_ELEMENTS, dtype=torch.float32)
    found = hashlib.sha256()
    for tensor in (drawn, drawn @ drawn, many * many):
        found.update(tensor.numpy().tobytes())
    return found.digest()


def _read_until(fd: int, deadline: float) -> bytes | None:
    """Read until the other end is closed; return None if the deadline passes first."""
    text = b""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not waiting.poll(left_s * 1e3):
            return None
        piece = b""
        with contextlib.suppress(InterruptedError):
            piece = os.read(fd, 4096)
        if not piece:
            return text
        text += piece


def _spoken(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
