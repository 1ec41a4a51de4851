# SPDX-License-Identifier: Apache-2.0
"""Faults that can be done to a process from outside, by its id."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterable, Iterator


def kill(pids: Iterable[int]) -> None:
    """With SIGKILL. One that has ended already is as good."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def crash(pid: int) -> None:
    """With SIGSEGV, as the process's own fault would, but for the core that it would leave."""
    with contextlib.suppress(ProcessLookupError):
        hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
        os.kill(pid, signal.SIGSEGV)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still, and then goes on without knowing that it did."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def no_more_descriptors(pid: int) -> Iterator[int]:
    """The process keeps what it has open and opens nothing more; gives how many it may have."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The limit is on the number of a descriptor: below it none may be free.
    numbers = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    limit = next(number for number in range(before[0]) if number not in numbers)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
