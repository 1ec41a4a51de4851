# SPDX-License-Identifier: Apache-2.0
"""The temporary folder into which a pool worker extracts the modules of jobs.

The process that started the worker owns the folder, since a killed worker cannot remove it. A
folder left by a killed owner is removed by the next owner that the same user starts.

A folder in use is locked. Its process id would not be enough: containers that share /tmp have
separate process ids, and ids are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class CodeFolder:
    """A folder with mode 0700 that exists from construction until :meth:`remove`."""

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
        # The process id is for people who look into /tmp.
        path = tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-")
        try:
            lock_fd = _try_lock(path)
        except OSError:
            return path, None  # this file system has no locks, so the folder is never removed early
        if lock_fd is not None:
            return path, lock_fd
        # Another process took the folder for an orphan before it was locked.


def _try_lock(path: str) -> int | None:
    """Return a descriptor that locks the folder until it is closed; None if another process has
    locked or removed the folder.
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
