# SPDX-License-Identifier: Apache-2.0
"""The temporary folder that a pool's worker extracts the modules of jobs in.

It belongs to the process that started the worker, since a killed worker removes nothing. A folder
that a killed starter has left is removed by the next one of the same user.

A folder that somebody has is locked. A process id would not tell: containers that share /tmp do not
share their process ids, and ids are used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class CodeFolder:
    """Is there from construction until :meth:`remove`; mode 0700."""

    def __init__(self) -> None:
        _remove_orphans()
        self.path, self._lock_fd = _make_locked()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _prefix() -> str:
    return f"penstock-code-{os.getuid()}-"


def _make_locked() -> tuple[str, int | None]:
    while True:
        # The id helps a reader of /tmp.
        path = tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-")
        try:
            lock_fd = _try_lock(path)
        except OSError:
            return path, None  # this file system has no locks, so nobody takes the folder away
        if lock_fd is not None:
            return path, lock_fd
        # Somebody took it for an orphan before it was locked.


def _try_lock(path: str) -> int | None:
    """A descriptor that locks the folder until it is closed; None if somebody else has locked it,
    or has taken it away.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, lock_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(lock_fd), os.lstat(path))
        except (BlockingIOError, FileNotFoundError):
            return None
        if is_there:
            stack.pop_all()
            return lock_fd
    return None


def _remove_orphans() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            lock_fd = _try_lock(str(path))
            if lock_fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)
