# SPDX-License-Identifier: Apache-2.0
"""The part of a sample cache that is on disk: a SQLite database in a folder of the user's.

SQLite is in Python's standard library. Its write-ahead log keeps the database whole when a process
is killed, any number of processes of one machine may use it at the same time, and a limit of its
pages is the budget. Each sample has a digest in addition, because SQLite does not detect changed
bits in it. Samples may contain pickles, so the folder must belong to the user alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import _C
from penstock.caching.memory_store import MISSING
from penstock.worker import batch_pickle

_FILE = "samples.sqlite"
_PAGE_BYTES = 16384
_PAGES_MIN = 16
_CACHED_PAGES = 16  # of a connection: a larger cache slows every read, and no page is read again
_JOURNAL_PAGES = 1024  # of the write-ahead log, until it is merged into the database
_WAIT_S = 60.0  # for another process that writes
_INDEX_BITS = 40  # of a row's number; the bits above them number the dataset


class DiskStore:
    """Samples of one dataset by index, in a folder that processes share. Thread-safe.

    Each thread of each process has its own connection: SQLite's must not be used after a fork.
    """

    def __init__(self, folder: Path, budget_bytes: int, key: str) -> None:
        """Create the folder if it does not exist. ``key`` identifies the dataset and all else that
        its samples depend on.

        Raises:
            PermissionError: If the folder belongs to another user or others may write to it.
            ValueError: If it is not a folder, or contains a file that is not a cache.
        """
        self._folder, self._key = folder, key
        self._page_count_max = max(_PAGES_MIN, budget_bytes // _PAGE_BYTES)
        self._open_locks()
        self._first_row = -1
        with contextlib.closing(self._connect()) as database:
            self._first_row = self._number(database) << _INDEX_BITS

    def _open_locks(self) -> None:
        self._connections = threading.local()
        self._inherited: list[Any] = []  # never closed in a child
        self._is_usable = True
        _check_folder(self._folder)
        # Held by every process that uses the dataset's samples: others must not delete them.
        self._lock = _open_lock(self._folder, self._key)
        weakref.finalize(self, os.close, self._lock)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def __reduce__(self) -> Any:
        return _reopen, (self._folder, self._page_count_max, self._key, self._first_row)

    @property
    def is_usable(self) -> bool:
        """Whether this process may use it."""
        return self._is_usable

    def get(self, index: int, tag: int) -> tuple[Any, int]:
        """Return a new object for the sample and its bytes; MISSING if it is not stored."""
        if not self._is_usable:
            return MISSING, 0
        query = "SELECT data FROM samples WHERE place = ?"
        row = self._database().execute(query, (self._first_row + index,)).fetchone()
        if row is None:
            return MISSING, 0
        return _C.load_sample(index, tag, row[0], batch_pickle.loads, MISSING), len(row[0])

    def some(self, fractions: Sequence[float], count: int) -> dict[int, bytes]:
        """Return the bytes of stored samples, by index: the next ones from these places among
        ``count`` indices."""
        query = "SELECT place, data FROM samples WHERE place BETWEEN ? AND ? ORDER BY place LIMIT 1"
        end, found = self._first_row + count - 1, {}
        for fraction in fractions:
            first = self._first_row + int(fraction * count)
            for place, data in self._database().execute(query, (first, end)):
                found[place - self._first_row] = data
        return found

    def put(self, index: int, data: bytes) -> bool:
        """Store a sample. Return whether there was room, perhaps by deleting samples of datasets
        that no process uses."""
        row = (self._first_row + index, data)
        if self._insert(row):
            return True
        try:
            return self._delete_unused() and self._insert(row)
        except sqlite3.OperationalError as error:
            if _is_full(error):  # deleting needs room, too
                return False
            raise

    def is_out_of_space(self) -> bool:
        """Return whether the file system is full, rather than the budget."""
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize < 4 * _PAGE_BYTES * _JOURNAL_PAGES

    def stop(self) -> None:
        """Neither read nor write from now on, in this process."""
        self._is_usable = False

    def clear(self) -> None:
        """Delete all samples of the dataset."""
        self._delete(self._database(), self._first_row >> _INDEX_BITS)

    def _insert(self, row: tuple[int, bytes]) -> bool:
        try:
            self._database().execute("INSERT OR REPLACE INTO samples VALUES (?, ?)", row)
        except sqlite3.OperationalError as error:
            if _is_full(error):
                return False
            raise
        return True

    def _database(self) -> sqlite3.Connection:
        own: tuple[int, sqlite3.Connection | None] = getattr(self._connections, "own", (0, None))
        owner, database = own
        if database is None or owner != os.getpid():
            self._inherited.append(database)
            database = self._connect()
            self._connections.own = os.getpid(), database
        return database

    def _connect(self) -> sqlite3.Connection:
        path = self._folder / _FILE
        database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
        try:
            database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"PRAGMA cache_size = {_CACHED_PAGES}")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(f"PRAGMA wal_autocheckpoint = {_JOURNAL_PAGES}")
            database.execute(f"PRAGMA journal_size_limit = {_JOURNAL_PAGES * _PAGE_BYTES}")
            database.execute(f"PRAGMA max_page_count = {self._page_count_max}")
            if self._first_row < 0:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS datasets (number INTEGER PRIMARY KEY, key UNIQUE)"
                )
                database.execute(
                    "CREATE TABLE IF NOT EXISTS samples (place INTEGER PRIMARY KEY, data BLOB)"
                )
        except sqlite3.OperationalError:
            database.close()
            raise
        except sqlite3.DatabaseError as error:
            database.close()
            raise ValueError(
                f"disk must be a folder of penstock's caches, got {str(self._folder)!r}, in which "
                f"{_FILE} is damaged or not a database ({error}); delete it or pass another folder"
            ) from error
        return database

    def _number(self, database: sqlite3.Connection) -> int:
        database.execute("INSERT OR IGNORE INTO datasets (key) VALUES (?)", (self._key,))
        query = "SELECT number FROM datasets WHERE key = ?"
        return int(database.execute(query, (self._key,)).fetchone()[0])

    def _delete_unused(self) -> bool:
        """Delete the samples of datasets that no process uses. Return whether there were any."""
        database, has_deleted = self._database(), False
        for number, key in database.execute("SELECT number, key FROM datasets").fetchall():
            if key == self._key:
                continue
            lock = _open_lock(self._folder, key)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_deleted |= self._delete(database, number)
            except BlockingIOError:
                continue
            finally:
                os.close(lock)
        return has_deleted

    @staticmethod
    def _delete(database: sqlite3.Connection, number: int) -> bool:
        span = number << _INDEX_BITS, ((number + 1) << _INDEX_BITS) - 1
        cursor = database.execute("DELETE FROM samples WHERE place BETWEEN ? AND ?", span)
        return cursor.rowcount > 0


def _open_lock(folder: Path, key: str) -> int:
    return os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _reopen(folder: Path, page_count_max: int, key: str, first_row: int) -> DiskStore:
    store: DiskStore = DiskStore.__new__(DiskStore)
    store._folder, store._key, store._first_row = folder, key, first_row
    store._page_count_max = page_count_max
    store._open_locks()
    return store


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ValueError(f"disk must be a folder, got the file {str(folder)!r}") from error
    for path in (folder, folder / _FILE):
        if not os.path.lexists(path):
            continue
        status = path.lstat() if path != folder else path.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(
                f"disk must be a folder of this user, got {str(path)!r} of user "
                f"{status.st_uid}: a cache may contain pickles, which run code of whoever wrote "
                f"them; pass a folder of your own"
            )
        if path == folder and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"disk must be a folder that only this user may write to, got {str(path)!r} with "
                f"mode {stat.S_IMODE(status.st_mode):o}: a cache may contain pickles; run "
                f"chmod go-w on it, or pass a folder below it"
            )


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Return whether the budget or the file system has no room."""
    return "full" in str(error)
