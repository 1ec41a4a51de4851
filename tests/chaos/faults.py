# SPDX-License-Identifier: Apache-2.0
"""Faults that can be injected into a process from outside, by its id."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterable, Iterator


def kill(pids: Iterable[int]) -> None:
    """With SIGKILL. A process that has ended already counts as killed."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def crash(pid: int) -> None:
    """With SIGSEGV, as the process's fault would, but without a core dump."""
    with contextlib.suppress(ProcessLookupError):
        hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
        os.kill(pid, signal.SIGSEGV)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped, and then continues without noticing it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def no_more_descriptors(pid: int) -> Iterator[int]:
    """The process keeps its open descriptors and opens no more; returns its limit."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The limit applies to descriptor numbers: below it none may be free.
    numbers = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    limit = next(number for number in range(before[0]) if number not in numbers)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
