# SPDX-License-Identifier: Apache-2.0
"""Where a loader keeps a pool's client between two iterators of the same job.

Torch ends its workers after each epoch and starts others for the next. The workers of a pool go on
in any case, and so does the client: it stays connected to them, so that the next epoch begins at
once, also while there is no controller. Two seconds without a request others may have the workers.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Any, NamedTuple

from penstock import _C
from penstock.loader.recall import Recaller

_is_exiting = threading.Event()  # the process: nobody will read anything
atexit.register(_is_exiting.set)


class _Parked(NamedTuple):
    client: _C.PoolClient
    purpose: Any
    owner_pid: int
    recaller: Recaller | None


class ParkedClient:
    """Has room for one. It is ended with the loader, or when the program exits."""

    def __init__(self) -> None:
        self._place: list[_Parked] = []
        # When the controller last answered a client of this loader's, by time.monotonic().
        self.controller_heard_at: float | None = None
        weakref.finalize(self, _end_all, self._place)

    def park(self, client: _C.PoolClient, purpose: Any, recaller: Recaller | None) -> None:
        """Nobody else may use ``client`` from now on, but for recalls. Ends the one that was
        here."""
        _end_all(self._place)
        self._place.append(_Parked(client, purpose, os.getpid(), recaller))

    @property
    def is_empty(self) -> bool:
        return not self._place

    def take(self, purpose: Any) -> _C.PoolClient | None:
        """The client, if one was parked here with the same ``purpose``; another is ended."""
        if not self._place:
            return None
        parked = self._place[0]
        if parked.purpose != purpose or parked.owner_pid != os.getpid():
            _end_all(self._place)
            return None
        self._place.clear()
        return parked.client


def _end_all(place: list[_Parked]) -> None:
    while place:
        parked = place.pop()
        if parked.owner_pid == os.getpid():  # a child that was forked off has not the thread
            if parked.recaller is not None and not _is_exiting.is_set():
                parked.recaller.recall_all()
            parked.client.stop()
