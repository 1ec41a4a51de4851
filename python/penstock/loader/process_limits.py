# SPDX-License-Identifier: Apache-2.0
"""The operating system's limits that concern a loader in the trainer's process.

Torch reports that a worker was killed, and not why: :func:`explain` adds that memory ran out, which
the kernel counts as ``oom_kill`` in /proc/vmstat (since Linux 4.13). ZeroMQ reports no limit on
open files: :func:`check_can_connect` does. Threads fork one after the other (:func:`fork_lock`),
and a fork does not change the memory that the program holds (:func:`retire_at_forks`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from penstock import _C
from penstock.compat.iterators import SIGNAL_MODULE

_KILLED = "is killed by signal: Killed"
_DESCRIPTORS_OF_A_CONNECTION = 4  # the TCP socket, and the wake-up descriptors of libzmq's threads

# The count when the workers of the newest iterator started. Earlier kills explain no later error.
_kills_before = 0


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for want of memory since it
    started; 0 if it does not report this.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def explain_later_kills() -> None:
    """Explain errors about workers killed from now on, including the errors that torch's handler of
    SIGCHLD raises anywhere in the trainer. Called when workers start.
    """
    global _kills_before
    _kills_before = oom_kills()
    handler = signal.getsignal(signal.SIGCHLD)
    is_torchs = getattr(handler, "__module__", None) == SIGNAL_MODULE
    if is_torchs and callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _explaining(handler))


def explain(error: RuntimeError) -> RuntimeError:
    """Return the error itself, with the reason added to its text if it is about a killed worker and
    memory ran out meanwhile.
    """
    text = str(error)
    count = oom_kills() - _kills_before if _KILLED in text else 0
    if count > 0 and "memory ran out" not in text:
        processes = "a process" if count == 1 else f"{count} processes"
        error.args = (
            f"{text.rstrip()} The kernel has killed {processes} because memory ran out since this "
            f"loader started its workers, probably including this one. Use fewer workers, a "
            f"smaller prefetch_factor or a smaller prefetch_bytes.",
        )
    return error


def _explaining(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    def handle(number: int, frame: Any) -> Any:
        try:
            return handler(number, frame)
        except RuntimeError as error:
            raise explain(error) from None

    return handle


def check_can_connect() -> None:
    """Raise OSError if the limit on descriptors is reached, so that no connection to a worker is
    possible. ZeroMQ does not report it and retries for ever.
    """
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(_DESCRIPTORS_OF_A_CONNECTION):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise OSError(
                error.errno,
                f"DataLoader cannot connect to the pool's workers: a connection needs "
                f"{_DESCRIPTORS_OF_A_CONNECTION} file descriptors, which exceeds the limit of this "
                f"process, {limit} open files; raise the limit (ulimit -n), or close files",
            ) from error


_fork_lock = threading.RLock()


def fork_lock() -> AbstractContextManager[bool]:
    """Return a context that no other thread is in at the same time, to fork a child in.

    Code that other packages run before a fork may not tolerate another thread's fork in between:
    filelock 4.3 raises RuntimeError from it.
    """
    return _fork_lock


def _renew_fork_lock() -> None:
    global _fork_lock
    _fork_lock = threading.RLock()  # another thread of the parent may hold the previous one


os.register_at_fork(after_in_child=_renew_fork_lock)

_live_clients: weakref.WeakSet[_C.Client] = weakref.WeakSet()


def retire_at_forks(client: _C.Client) -> None:
    """Prevent the reuse of the slabs of `client` that are held when this process forks.

    The slabs of this process and of its children are the same pages. `os.register_at_fork` cannot
    remove a hook, so there is one for all clients.
    """
    _live_clients.add(client)


def _retire_leased_slabs() -> None:
    for client in list(_live_clients):
        client.retire_held()


os.register_at_fork(before=_retire_leased_slabs)
