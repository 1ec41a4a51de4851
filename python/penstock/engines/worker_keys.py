# SPDX-License-Identifier: Apache-2.0
"""The keys of an elastic pool's workers: a folder with only ``worker.secret`` and the public keys
of the operator's folder, because workers run the code of training programs.

It is a copy, including file modes, so that a worker rejects the same files as in the operator's
folder. It follows that folder, in which users are added and removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from penstock.errors import PenstockError

_SECRET = "worker.secret"
_PUBLIC_END = ".public"
_FORMER_END = ".former.public"
_KEY_BYTES_MAX = 4096  # copied at most; a key has 41
_Mark = tuple[int, int, int]  # differs for another file or other content


class WorkerKeys:
    """Confined to one thread. ``trouble`` is the reason if the folder is not up to date."""

    def __init__(self, source: Path, folder: Path) -> None:
        """Raises PenstockError if ``source`` has no key for workers."""
        self._source = source
        self.folder = folder
        self.trouble = ""
        self._marks: dict[str, _Mark] = {}
        if not (source / _SECRET).exists():
            raise PenstockError(
                f"the key folder {source} has no {_SECRET}, which workers need: copy it there, or "
                "name the key folder of the workers' machines with --worker-keys"
            )
        self.catch_up()

    def catch_up(self) -> None:
        """Copy changed files of the operator's folder, and remove files that are gone there."""
        try:
            self._follow()
        except OSError as error:
            where = error.filename or self.folder
            self.trouble = f"the workers' keys cannot be copied ({error.strerror}): {where}"
        else:
            self.trouble = ""

    def _follow(self) -> None:
        marks = {
            entry.name: _mark(entry)
            for entry in os.scandir(self._source)
            if entry.name == _SECRET
            or (entry.name.endswith(_PUBLIC_END) and not entry.name.startswith("."))
        }
        if _SECRET not in marks:  # workers continue with the one that they have
            path = str(self._source / _SECRET)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if marks == self._marks:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for name in sorted(marks, key=_copy_order):
            if self._marks.get(name) != marks[name]:
                self._copy(name)
        for name in os.listdir(self.folder):
            if name not in marks:
                os.unlink(self.folder / name)
        self._marks = marks

    def _copy(self, name: str) -> None:
        """Copy a file atomically."""
        new = self.folder / f".{name}.new"
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._source / name, flags)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            content = os.read(fd, _KEY_BYTES_MAX)
        finally:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
        new.replace(self.folder / name)

    def remove(self) -> None:
        """Remove the folder. Call it when no worker is left."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _copy_order(name: str) -> int:
    """Return a sort key. During key rotation, holders of a former key remain known, and a secret
    always belongs to an existing key."""
    return 0 if name.endswith(_FORMER_END) else 2 if name == _SECRET else 1


def _mark(entry: os.DirEntry[str]) -> _Mark:
    status = entry.stat(follow_symlinks=False)
    return status.st_ino, status.st_size, status.st_ctime_ns
