# SPDX-License-Identifier: Apache-2.0
"""What is known of a pool that is watched: its last status, the minutes before, its events and its
totals. One thread asks the controller; any number of readers cost it nothing."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock import _pool
from penstock._version import __version__
from penstock.errors import PenstockError
from penstock.live.event_log import EventLog
from penstock.live.exposition import exposition
from penstock.live.pool_history import POINTS_MAX, PoolHistory
from penstock.live.pool_metrics import pool_metrics
from penstock.live.pool_totals import PoolTotals
from penstock.live.pool_view import PoolView, with_short_ids
from penstock.live.shown_plan_graph import shown_plan_graph
from penstock.live.status_poller import PoolAddress, StatusPoller
from penstock.live.step_parts import STEP_PARTS
from penstock.live.top_rows import as_json

INTERVAL_S = 1.0
PLAN_S = 5.0  # for which a trainer's plan is not asked for again
STALE_S = 5.0  # then a status is too old to be shown as the state of the pool


class PoolWatch:
    """Thread-safe. Readers raise PenstockError while the controller does not answer. Unless it
    ``shows_ids``, they get 8 digits of each id."""

    def __init__(self, address: PoolAddress, *, shows_ids: bool = True) -> None:
        self._shows_ids = shows_ids
        self._lock = threading.Lock()
        self._view: PoolView | None = None
        self._trainer_ids: dict[str, str] = {}  # by the ids that are shown
        self._taken_at = 0.0  # by a clock that is never set
        self._trouble = "the controller has not answered yet; ask again in a second"
        self._events = EventLog()
        self._history = PoolHistory()
        self._totals = PoolTotals()
        self._status: bytes | None = None  # of _view, once somebody has asked for it
        self._address = address
        self._plans_lock = threading.Lock()  # held while the controller is asked for one
        self._plans: dict[str, tuple[float, bytes]] = {}  # with the time when it was asked for
        self._poller = StatusPoller(address, INTERVAL_S, self.take, self._fail)

    def start(self) -> None:
        self._poller.start()

    def close(self) -> None:
        """Waits for the request that is under way."""
        self._poller.close()

    def take(self, view: PoolView) -> None:
        """Takes the next status; the thread that asks does so."""
        ids = [one.id for one in view.trainers]
        view = view if self._shows_ids else with_short_ids(view)
        with self._lock:
            self._trainer_ids = {
                shown.id: identity for shown, identity in zip(view.trainers, ids, strict=True)
            }
            self._view, self._trouble, self._status = view, "", None
            self._taken_at = time.monotonic()
            self._events.add(view)
            self._history.add(view)
            self._totals.add(view)

    def _fail(self, sentence: str) -> None:
        with self._lock:
            self._trouble = sentence

    def _current(self) -> PoolView:
        """Under the lock."""
        if self._view is None:
            raise PenstockError(self._trouble)
        age_s = time.monotonic() - self._taken_at
        if age_s > STALE_S:
            why = self._trouble or "it answers no more"
            raise PenstockError(f"the last status is {age_s:.0f} s old: {why}")
        return self._view

    def status_json(self) -> bytes:
        """The pool now; made once of each status."""
        with self._lock:
            view = self._current()
            if self._status is None:
                fields = as_json(view)
                fields["penstock"] = __version__
                fields["step_parts"] = [asdict(part) for part in STEP_PARTS]
                self._status = _encoded(fields)
            return self._status

    def history_json(self, since: int) -> bytes:
        """The points after the one of that number."""
        with self._lock:
            self._current()
            points: Sequence[dict[str, Any]] = self._history.points()
        newer = [point for point in points if point["sequence"] > since]
        return _encoded({"interval_s": INTERVAL_S, "points_max": POINTS_MAX, "points": newer})

    def events_json(self, since: int) -> bytes:
        """The events after the one of that number, newest last."""
        with self._lock:
            view = self._current()
            events = self._events.events()
        newer = [asdict(event) for event in events if event.sequence > since]
        return _encoded({"controller": view.controller, "events": newer})

    def plan_json(self, trainer: str) -> bytes:
        """The plan of one trainer, which the controller is asked for, though not by every reader.
        A trainer that has left since its id was read has none. Raises ValueError for what is no id,
        and for a trainer whose plan is none."""
        if not re.fullmatch(r"[0-9a-f]{8}([0-9a-f]{8})?", trainer):
            raise ValueError(f"trainer is {trainer[:40]!r}; an id that /api/status has is expected")
        with self._lock:
            self._current()
            ids = self._trainer_ids
        if trainer not in ids:
            return _encoded({"trainer": trainer, "plan": None, "has_left": True})
        with self._plans_lock:
            known = self._plans.get(trainer)
            if known is None or time.monotonic() - known[0] > PLAN_S:
                plan = shown_plan_graph(self._ask_plan(ids[trainer]))
                known = (
                    time.monotonic(),
                    _encoded({"trainer": trainer, "plan": plan, "has_left": False}),
                )
                self._plans = {id: kept for id, kept in self._plans.items() if id in ids}
                self._plans[trainer] = known
            return known[1]

    def _ask_plan(self, trainer: str) -> str:
        where = self._address
        return _pool.pool_plan(where.endpoint, where.keys, int(trainer, 16), where.timeout_s)

    def metrics_text(self, *, is_open: bool) -> bytes:
        with self._lock:
            view = self._current()
            metrics = pool_metrics(view, self._totals, self._events.counts, time.time())
        return exposition(metrics, is_open=is_open).encode()


def _encoded(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
