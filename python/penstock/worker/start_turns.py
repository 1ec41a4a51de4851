# SPDX-License-Identifier: Apache-2.0
"""Make workers in new interpreters take turns with their imports, one per core at a time.

Importing torch keeps a core busy for more than a second. If all workers import it at the same time,
all are ready at the same late time; if they take turns, the first ones make batches while the
others start, and the last one is ready no later.

Worker k waits for worker k - core_count: for the end of file of a pipe whose other end only that
worker holds, and closes when its imports are done or when it dies. The trainer is not involved.
"""

from __future__ import annotations

import os
from multiprocessing import connection, reduction
from operator import itemgetter, methodcaller
from typing import Any

# Importing a worker's main module may run any code, which may even wait for another worker.
_TURN_S_MAX = 10.0


class StartTurns:
    """The pipes between the workers of one pool. Confined to the thread that starts them.

    Call :meth:`close` when all workers are started, or when one could not be.
    """

    def __init__(self, worker_count: int, core_count: int) -> None:
        self._worker_count = worker_count
        self._core_count = core_count
        self._awaited: dict[int, int] = {}  # by the waiting worker
        self._held: int | None = None  # by the worker that is being started
        self._next_worker = 0

    def next_turn(self) -> StartTurn:
        """Return the turn of the next worker. The previous worker must have been started."""
        self._drop_held()
        worker_id, self._next_worker = self._next_worker, self._next_worker + 1
        if worker_id + self._core_count < self._worker_count:
            self._awaited[worker_id + self._core_count], self._held = os.pipe()
        return StartTurn(self._awaited.get(worker_id), self._held)

    def close(self) -> None:
        self._drop_held()
        while self._awaited:
            os.close(self._awaited.popitem()[1])

    def _drop_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            os.close(held)


class StartTurn:
    """One worker's turn, which must be the first of its arguments.

    It ends when it is unpickled: the worker's imports are done by then.
    """

    def __init__(self, awaited: int | None = None, held: int | None = None) -> None:
        self._awaited = awaited
        self._held = held

    def begin_with_name(self, process: Any) -> None:
        """Make ``process``, which is not started yet, wait for its turn."""
        if self._awaited is not None:
            process.name = _AwaitedName.make(process.name, self._awaited)

    def __reduce__(self) -> Any:
        return _end_turn, (None if self._held is None else reduction.DupFd(self._held),)


def _end_turn(held: Any) -> StartTurn:
    if held is not None:
        os.close(held.detach())
    return StartTurn()


class _AwaitedName(str):
    """The name of a process, which the process reads first, before its main module.

    It is pickled as calls that wait for the turn and then return the name. They call only functions
    of Python's standard library, since ours are not available without importing torch. A second
    pickle, in the process object, does not wait.
    """

    awaited: int | None

    @classmethod
    def make(cls, name: str, awaited: int) -> _AwaitedName:
        made = cls(name)
        made.awaited = awaited
        return made

    def __reduce__(self) -> Any:
        if self.awaited is None:
            return str, (str(self),)
        fd = _Call(methodcaller("detach"), reduction.DupFd(self.awaited))
        self.awaited = None
        wait, close = _Call(connection.wait, [fd], _TURN_S_MAX), _Call(os.close, fd)
        return itemgetter(2), ((wait, close, str(self)),)


class _Call:
    """The result of a function that is called on unpickling."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call
