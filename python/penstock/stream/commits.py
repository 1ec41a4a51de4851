# SPDX-License-Identifier: Apache-2.0
"""Commits of one epoch: which batches the program is done with.

Without commits the state of a loader covers the batches that were delivered. With them it covers
the ones committed by the program, in any order. A batch that was delivered and not committed is
outstanding, and a resumed loader delivers it again. The state of an epoch under way names the
places that are left, as with ``in_order=False``. Outstanding batches of earlier epochs are kept
with their indices and seeds, since the program's sampler has moved on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.stream.places import DeliveredPlaces, PlacesLeft


class BatchId(NamedTuple):
    """The name of a batch in its loader's stream, the same after a resume.

    Attributes:
        epoch (int): Number of the epoch, from 0, counted by the loader and its states.
        batch (int): Place of the batch in the order of that epoch, from 0.
    """

    epoch: int
    batch: int


class PulledBatch(NamedTuple):
    """Result of the sampler for a batch, and the place of its first sample in the epoch."""

    index: Any
    first_place: int


class Ledger(Protocol):
    """The commits of one loader, as its epochs use them."""

    lock: threading.RLock

    def note_delivery(self, epoch: OpenEpoch, place: int, batch: Any) -> None:
        """Note that the program receives ``batch``, which is at ``place`` of ``epoch``."""


@dataclass
class OpenEpoch:
    """The batches of one epoch that are not committed yet.

    The ledger's lock guards it.
    """

    ledger: Ledger
    number: int
    places: DeliveredPlaces
    seed_epoch: int = 0  # the epoch number that draws follow from
    base_seed: int = 0
    outstanding: set[int] = field(default_factory=set)
    pulled: dict[int, PulledBatch] = field(default_factory=dict)  # not committed, by place
    # Pulls the batch at a place again, for an order that the native side draws.
    pull_again: Callable[[int], PulledBatch] | None = None

    def left(self) -> PlacesLeft:
        """Return the places that are not committed."""
        with self.ledger.lock:
            return self.places.left()

    def note_pull(self, place: int, index: Any, first_place: int) -> None:
        """Note the result of the sampler for the batch at ``place``."""
        if type(index) is list:
            index = index.copy()  # the sampler may fill the same list again
        with self.ledger.lock:
            self.pulled.setdefault(place, PulledBatch(index, first_place))

    def deliver(self, place: int, batch: Any) -> None:
        """Note that the program receives ``batch``, which is at ``place``."""
        self.ledger.note_delivery(self, place, batch)

    def omit(self, place: int) -> None:
        """Commit a batch without samples, which the program never receives."""
        with self.ledger.lock:
            self.commit(place)

    def commit(self, place: int) -> None:
        self.outstanding.discard(place)
        self.pulled.pop(place, None)
        self.places.note_place(place)

    def keep_outstanding(self) -> None:
        """Keep what making the outstanding batches again needs, and nothing else: the epoch is
        over."""
        pull_again = self.pull_again
        if pull_again is not None:
            self.pulled = {place: pull_again(place) for place in self.outstanding}
            self.pull_again = None
        self.pulled = {place: self.pulled[place] for place in sorted(self.outstanding)}
