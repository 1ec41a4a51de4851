# SPDX-License-Identifier: Apache-2.0
"""The last events of a pool, which follow from its statuses: a controller reports none."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from penstock.live.pool_changes import changes_between
from penstock.live.pool_view import PoolView

EVENTS_MAX = 200


@dataclass(frozen=True, slots=True)
class EventView:
    """``at`` is when the status came that shows it, in seconds since 1970."""

    sequence: int
    at: float
    kind: str
    text: str
    trainer: str | None
    worker: str | None


class EventLog:
    """Confined to the thread that takes the statuses; what ``events`` returns may go to others."""

    def __init__(self) -> None:
        self._events: deque[EventView] = deque(maxlen=EVENTS_MAX)
        self._last: PoolView | None = None
        self._sequence = 0
        self.counts: Counter[str] = Counter()  # of all that were seen, by kind

    def add(self, view: PoolView) -> None:
        """Takes the next status. With another controller the events begin again."""
        last, self._last = self._last, view
        if last is None:
            return
        if last.controller != view.controller:
            self._events.clear()
            self._sequence = 0
            return
        for change in changes_between(last, view):
            self._sequence += 1
            self._events.append(EventView(self._sequence, view.at, *change))
            self.counts[change.kind] += 1

    def events(self) -> tuple[EventView, ...]:
        """Newest last."""
        return tuple(self._events)
