# SPDX-License-Identifier: Apache-2.0
"""Order the requests of a worker for execution.

At the end of an epoch, the trainer may request batches of the next one, which may never start. They
are made immediately if that is unobservable, that is, if the dataset has not changed and the random
number generators can be restored; otherwise they wait for their epoch.

After a resume, batches may be requested out of turn: with a number other than the position in the
epoch that determines the random numbers (`IndicesAtPlace`); or after other batches, made and
discarded, that bring a map-style dataset to its earlier state (`IndicesAfterOthers`).
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock import _C
from penstock.stream.batch_seeds import generator_states, restore
from penstock.worker.dataset_watch import Watch
from penstock.worker.fetching import BatchPlace
from penstock.worker.partial_batch import without_errors
from penstock.worker.read_ahead import ReadAhead

_Key = tuple[int, int]  # of a fetch: its epoch and its number there

# One wait for a request; the native side detects a dead trainer and signals by itself.
_IDLE_S = 3600.0


class RequestFeed:
    """Returns fetches, epochs, early epochs (handled as epochs) and questions about states.

    ``rows`` has the tensors of a plain TensorDataset, whose fetches are executed natively here.
    ``watch`` is None if epochs never start early; ``read_ahead`` if no files are known. With
    ``looks_ahead``, :meth:`take_upcoming` returns what follows. Raises ClosedError when the trainer
    has hung up.
    """

    def __init__(
        self,
        server: _C.WorkerServer,
        rows: list[torch.Tensor] | None,
        watch: Watch | None,
        read_ahead: ReadAhead | None = None,
        looks_ahead: bool = False,
    ) -> None:
        self._server = server
        self._read_ahead = read_ahead
        self._looks_ahead = looks_ahead
        # Fetches that have arrived and were returned by neither method, in their order; and the
        # keys of all that next() has not returned.
        self._upcoming: dict[_Key, _C.WorkerRequest] = {}
        self._arrived: set[_Key] = set()
        self._rows = rows
        self._watch = watch
        self._received: deque[_C.WorkerRequest] = deque()
        self._early_epoch: int | None = None  # while its fetches are executed before it starts
        self._generators: tuple[Any, ...] = ()  # their states before that
        self._pending_epoch: int | None = None  # whose fetches wait until it starts
        self._held: list[_C.WorkerRequest] = []
        self._note_epoch()

    def _note_epoch(self) -> None:
        self._began_at = time.monotonic()
        self._fetch_count = 0  # since then

    def next(self) -> _C.WorkerRequest:
        while True:
            if self._early_epoch is not None and self._rows is None:
                self._read_to_epoch()
            request = self._received.popleft() if self._received else self._receive()
            if request.is_for_states:
                return request
            if request.is_early_epoch:
                if self._try_begin_early(request):
                    return request
            elif not request.is_epoch:
                if request.epoch == self._pending_epoch:
                    self._held.append(request)
                    continue
                self._fetch_count += 1
                self._arrived.discard(_key(request))
                self._upcoming.pop(_key(request), None)
                return request
            elif request.epoch == self._early_epoch:
                self._adopt_early(request)
            else:
                self._begin(request)
                return request

    def take_upcoming(self, request: _C.WorkerRequest) -> list[_C.WorkerRequest]:
        """Return the fetches that follow ``request`` in its epoch, as far as they have arrived,
        each once and without those whose indices are pickled. :meth:`next` returns them, too."""
        if request.is_pickled or self._early_epoch is not None:
            return []
        self._read_upcoming()
        keys = [key for key in self._upcoming if key[0] == request.epoch]
        return [self._upcoming.pop(key) for key in keys]

    def _receive(self) -> _C.WorkerRequest:
        while True:
            request = (
                self._server.next(_IDLE_S)
                if self._rows is None
                else self._server.serve_rows(self._rows)
            )
            if request is not None:
                self._note_fetch(request)
                return request

    def _note_fetch(self, request: _C.WorkerRequest) -> None:
        """Note a request that has been received, and the fetches behind it."""
        is_fetch = not (request.is_epoch or request.is_early_epoch or request.is_for_states)
        if not is_fetch or request.is_pickled:
            return
        if self._read_ahead is not None:
            self._read_ahead.note(request.indices())
        self._note_arrived(request)
        self._read_upcoming()

    def _note_arrived(self, request: _C.WorkerRequest) -> None:
        if self._looks_ahead and _key(request) not in self._arrived:
            self._arrived.add(_key(request))
            self._upcoming[_key(request)] = request

    def _read_upcoming(self) -> None:
        if self._read_ahead is None and not self._looks_ahead:
            return
        upcoming = [one for one in self._server.upcoming() if not one.is_pickled]
        if self._read_ahead is not None:
            for one in upcoming:
                self._read_ahead.note_upcoming(one.indices())
        for one in upcoming:
            self._note_arrived(one)

    def _read_to_epoch(self) -> None:
        """Read the messages received so far, up to an epoch: either the early epoch, which is now a
        regular one, or another one, before which fetches that will be dropped are not executed.
        """
        while (request := self._server.next(0.0)) is not None:
            self._note_fetch(request)
            if request.is_epoch and request.epoch == self._early_epoch:
                self._adopt_early(request)
                return
            if request.is_epoch:
                self._received.clear()
            self._received.append(request)
            if request.is_epoch:
                return

    def _try_begin_early(self, request: _C.WorkerRequest) -> bool:
        """Return whether fetches of the early epoch are executed now; otherwise they wait."""
        batch_s = (time.monotonic() - self._began_at) / max(1, self._fetch_count)
        if self._watch is None or not self._watch.is_unchanged(batch_s):
            self._pending_epoch = request.epoch
            return False
        self._note_epoch()
        self._early_epoch = request.epoch
        self._generators = generator_states()
        return True

    def _begin(self, request: _C.WorkerRequest) -> None:
        """Start an epoch that was not started early; its fetches may have waited for it."""
        if self._early_epoch is not None:
            self._drop_early()
        if request.epoch == self._pending_epoch:
            self._received.extend(self._held)
        self._pending_epoch = None
        self._held.clear()
        self._forget_other_epochs(request.epoch)
        self._note_epoch()

    def _adopt_early(self, request: _C.WorkerRequest) -> None:
        self._early_epoch = None
        self._forget_other_epochs(request.epoch)
        self._began_at = time.monotonic()  # the trainer may have done other work meanwhile

    def _forget_other_epochs(self, epoch: int) -> None:
        self._arrived = {key for key in self._arrived if key[0] == epoch}
        self._upcoming = {key: one for key, one in self._upcoming.items() if key[0] == epoch}

    def _drop_early(self) -> None:
        self._early_epoch = None
        restore(self._generators)
        if self._watch is not None and self._fetch_count > 0:
            self._watch.note_dropped(self._fetch_count)


def _key(request: _C.WorkerRequest) -> _Key:
    return request.epoch, request.sequence


def indices_of(request: _C.WorkerRequest | _C.PoolWork) -> Any:
    indices = request.indices()
    return pickle.loads(indices) if request.is_pickled else indices


@dataclass(frozen=True, slots=True, repr=False)
class IndicesAtPlace:
    """Replaces the indices in a request."""

    indices: Any
    place: int

    def __repr__(self) -> str:
        """Return the repr of the indices, which a message about a late batch shows."""
        return repr(self.indices)


@dataclass(frozen=True, slots=True, repr=False)
class IndicesAfterOthers:
    """Replaces the indices in the first request to a worker."""

    indices: Any
    others: tuple[tuple[Any, int, int], ...]  # indices, number and first place of each

    def __repr__(self) -> str:
        return repr(self.indices)


def make_preceding(
    indices: Any,
    place: BatchPlace,
    fetch: Callable[[Any, BatchPlace], Any],
    begin: Callable[[], None],
) -> Any:
    """Make the preceding batches, if there are any, and return the indices."""
    if type(indices) is not IndicesAfterOthers:
        return indices
    for others, number, first_place in indices.others:
        begin()
        try:
            without_errors(fetch(others, BatchPlace(number, place.shard_id, first_place)))
        except Exception:
            pass  # it was also raised before the state was taken
    begin()
    return indices.indices


def unwrap_indices(indices: Any, place: BatchPlace) -> tuple[Any, BatchPlace]:
    """Return the indices themselves, and the position of their batch."""
    if type(indices) is not IndicesAtPlace:
        return indices, place
    return indices.indices, place._replace(sequence=indices.place)
