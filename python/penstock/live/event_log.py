# SPDX-License-Identifier: Apache-2.0
"""The last events of a pool: its controller's own, or those that follow from its statuses."""

from __future__ import annotations

from collections import Counter, deque

from penstock.live.derived_events import changes_between
from penstock.live.pool_view import EventView, PoolView

EVENTS_MAX = 200


class EventLog:
    """Confined to the thread that takes the statuses; what ``events`` returns may go to others."""

    def __init__(self) -> None:
        self._events: deque[EventView] = deque(maxlen=EVENTS_MAX)
        self._last: PoolView | None = None
        self._sequence = 0
        self.counts: Counter[str] = Counter()  # of all that were seen, by kind

    def add(self, view: PoolView) -> None:
        """Takes the next status. The controller's own numbers start again with another one."""
        last, self._last = self._last, view
        if last is not None and last.controller != view.controller:
            self._events.clear()
            self._sequence = 0
            last = None
        if view.events is not None:
            new = [event for event in view.events if event.sequence > self._sequence]
        elif last is not None:
            changes = enumerate(changes_between(last, view), self._sequence + 1)
            new = [EventView(sequence, view.at, *change) for sequence, change in changes]
        else:
            new = []
        self._events.extend(new)
        self.counts.update(event.kind for event in new)
        if new:
            self._sequence = new[-1].sequence

    def events(self) -> tuple[EventView, ...]:
        """Newest last."""
        return tuple(self._events)
