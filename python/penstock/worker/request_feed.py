# SPDX-License-Identifier: Apache-2.0
"""The requests of a worker in the order in which it carries them out.

While an epoch comes to its end the trainer may ask for batches of the next one, which will perhaps
never begin. They are made at once where nobody can tell, that is, where the dataset has not changed
and the random numbers can be taken back; else they wait for their epoch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from penstock import _C
from penstock.stream.batch_seeds import generator_states, put_back
from penstock.worker.dataset_watch import Watch

_IDLE_S = (
    3600.0  # one wait for a request; the native side notices a dead trainer and signals by itself
)


class RequestFeed:
    """Gives out fetches, epochs, early epochs, which are treated as epochs, and questions about
    states.

    ``rows`` are those of a plain TensorDataset, whose fetches are carried out natively on the way.
    ``watch`` is None where no epoch begins early. Raises ClosedError when the trainer has hung up.
    """

    def __init__(
        self,
        server: _C.WorkerServer,
        rows: list[torch.Tensor] | None,
        watch: Watch | None,
    ) -> None:
        self._server = server
        self._rows = rows
        self._watch = watch
        self._received: deque[_C.WorkerRequest] = deque()
        self._early_epoch: int | None = None  # while its fetches are carried out before it begins
        self._generators: tuple[Any, ...] = ()  # as they were before
        self._awaited_epoch: int | None = None  # whose fetches wait until it begins
        self._held: list[_C.WorkerRequest] = []
        self._note_epoch()

    def _note_epoch(self) -> None:
        self._began_at = time.monotonic()
        self._fetch_count = 0  # since then

    def next(self) -> _C.WorkerRequest:
        while True:
            if self._early_epoch is not None and self._rows is None:
                self._look_for_epoch()
            request = self._received.popleft() if self._received else self._receive()
            if request.is_for_states:
                return request
            if request.is_early_epoch:
                if self._try_begin_early(request):
                    return request
            elif not request.is_epoch:
                if request.epoch == self._awaited_epoch:
                    self._held.append(request)
                    continue
                self._fetch_count += 1
                return request
            elif request.epoch == self._early_epoch:
                self._adopt_early()
            else:
                self._begin(request)
                return request

    def _receive(self) -> _C.WorkerRequest:
        while True:
            request = (
                self._server.next(_IDLE_S)
                if self._rows is None
                else self._server.serve_rows(self._rows)
            )
            if request is not None:
                return request

    def _look_for_epoch(self) -> None:
        """Takes in the messages that have come, up to an epoch: the early one, which is now one
        like any other, or another, before which fetches are not carried out that are dropped
        anyway.
        """
        while (request := self._server.next(0.0)) is not None:
            if request.is_epoch and request.epoch == self._early_epoch:
                self._adopt_early()
                return
            if request.is_epoch:
                self._received.clear()
            self._received.append(request)
            if request.is_epoch:
                return

    def _try_begin_early(self, request: _C.WorkerRequest) -> bool:
        """Whether fetches of the early epoch are carried out before it begins; else they wait."""
        batch_s = (time.monotonic() - self._began_at) / max(1, self._fetch_count)
        if self._watch is None or not self._watch.has_stayed(batch_s):
            self._awaited_epoch = request.epoch
            return False
        self._note_epoch()
        self._early_epoch = request.epoch
        self._generators = generator_states()
        return True

    def _begin(self, request: _C.WorkerRequest) -> None:
        """An epoch begins that was not begun early; its fetches may have waited for it."""
        if self._early_epoch is not None:
            self._drop_early()
        if request.epoch == self._awaited_epoch:
            self._received.extend(self._held)
        self._awaited_epoch = None
        self._held.clear()
        self._note_epoch()

    def _adopt_early(self) -> None:
        self._early_epoch = None
        self._began_at = time.monotonic()  # the trainer may have done something else meanwhile

    def _drop_early(self) -> None:
        self._early_epoch = None
        put_back(self._generators)
        if self._watch is not None and self._fetch_count > 0:
            self._watch.note_dropped(self._fetch_count)
