# SPDX-License-Identifier: Apache-2.0
"""The data kept about a watched pool, for the dashboard and `penstock top`: its last status, the
minutes before, its events, its totals, and the plans of its trainers. One thread asks the
controller, so additional readers add no requests."""

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
from penstock.graph.plan_picture import read_picture
from penstock.live.pool_history import (
    POINTS_MAX,
    EndedJob,
    EndedJobs,
    EventLog,
    EventView,
    PoolHistory,
)
from penstock.live.pool_metrics import PoolTotals, exposition, pool_metrics
from penstock.live.pool_view import (
    LIMITS,
    STEP_PARTS,
    PoolAddress,
    PoolView,
    StatusPoller,
    with_short_ids,
)

INTERVAL_S = 1.0
PLAN_S = 5.0  # how long a trainer's plan is cached
STALE_S = 5.0  # the age at which a status is too old to be shown as the pool's state


class PoolWatch:
    """Thread-safe. Readers raise PenstockError while the controller does not answer. They receive 8
    digits of each id, unless ``shows_ids``."""

    def __init__(
        self, address: PoolAddress, *, shows_ids: bool = True, interval_s: float = INTERVAL_S
    ) -> None:
        self._shows_ids = shows_ids
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._view: PoolView | None = None
        self._trainer_ids: dict[str, str] = {}  # by the displayed ids
        self._taken_at = 0.0  # by the monotonic clock
        self._trouble = "the controller has not answered yet; ask again in a second"
        self._events = EventLog()
        self._ended = EndedJobs()
        self._history = PoolHistory()
        self._totals = PoolTotals()
        self._status: bytes | None = None  # the JSON of _view, once a reader has requested it
        self._address = address
        self._plans_lock = threading.Lock()  # held during a request for a plan
        self._plans: dict[str, tuple[float, bytes]] = {}  # with the time of the request
        self._poller = StatusPoller(address, interval_s, self.take, self._fail)

    def start(self) -> None:
        self._poller.start()

    def ask_now(self) -> None:
        """Ask before the interval has passed."""
        self._poller.poll_now()

    def close(self) -> None:
        """Stop asking, and wait for the request in flight."""
        self._poller.close()

    def latest(self) -> tuple[PoolView | None, tuple[EventView, ...], str]:
        """Return the last view, however old, its events, and why no newer view was received; "" if
        the last request succeeded."""
        with self._lock:
            return self._view, self._events.events(), self._trouble

    def ended_jobs(self) -> tuple[EndedJob, ...]:
        """Return the jobs that have left, newest last."""
        with self._lock:
            return self._ended.jobs()

    def take(self, view: PoolView) -> None:
        """Take the next status. Called by the asking thread."""
        ids = [one.id for one in view.trainers]
        view = view if self._shows_ids else with_short_ids(view)
        with self._lock:
            self._trainer_ids = {
                shown.id: identity for shown, identity in zip(view.trainers, ids, strict=True)
            }
            self._view, self._trouble, self._status = view, "", None
            self._taken_at = time.monotonic()
            self._events.add(view)
            self._ended.add(view)
            self._history.add(view)
            self._totals.add(view)

    def _fail(self, sentence: str) -> None:
        with self._lock:
            self._trouble = sentence

    def _current(self) -> PoolView:
        """Return the current view. Requires the lock."""
        if self._view is None:
            raise PenstockError(self._trouble)
        age_s = time.monotonic() - self._taken_at
        if age_s > STALE_S:
            why = self._trouble or "the controller no longer answers"
            raise PenstockError(f"the last status is {age_s:.0f} s old: {why}")
        return self._view

    def status_json(self) -> bytes:
        """Return the current status; serialized once per status."""
        with self._lock:
            view = self._current()
            if self._status is None:
                fields = view.as_json()
                fields["ended_jobs"] = [asdict(job) for job in self._ended.jobs()]
                fields["limits"] = LIMITS
                fields["penstock"] = __version__
                fields["step_parts"] = [asdict(part) for part in STEP_PARTS]
                self._status = _encoded(fields)
            return self._status

    def history_json(self, since: int) -> bytes:
        """Return the points after number ``since``."""
        with self._lock:
            self._current()
            points: Sequence[dict[str, Any]] = self._history.points()
        newer = [point for point in points if point["sequence"] > since]
        fields = {"interval_s": self._interval_s, "points_max": POINTS_MAX, "points": newer}
        return _encoded(fields)

    def events_json(self, since: int) -> bytes:
        """Return the events after number ``since``, newest last."""
        with self._lock:
            view = self._current()
            events = self._events.events()
        newer = [asdict(event) for event in events if event.sequence > since]
        return _encoded({"controller": view.controller, "events": newer})

    def plan_json(self, trainer: str) -> bytes:
        """Return a trainer's plan, which the controller is asked for at most once per PLAN_S. A
        trainer that has left since its id was read has none. Raises ValueError for an invalid id
        and for an invalid plan."""
        if not re.fullmatch(r"[0-9a-f]{8}([0-9a-f]{8})?", trainer):
            raise ValueError(f"trainer must be an id from /api/status, got {trainer[:40]!r}")
        with self._lock:
            self._current()
            ids = self._trainer_ids
        if trainer not in ids:
            return _encoded({"trainer": trainer, "plan": None, "has_left": True})
        with self._plans_lock:
            known = self._plans.get(trainer)
            if known is None or time.monotonic() - known[0] > PLAN_S:
                plan = shown_plan(self._ask_plan(ids[trainer]))
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


def shown_plan(told: str) -> dict[str, Any] | None:
    """Return the picture of a plan that a trainer has reported, None without a plan. Raises
    ValueError for an invalid plan, since a trainer may send any text."""
    if not told:
        return None
    try:
        return read_picture(told)
    except Exception as error:
        raise ValueError(
            f"the trainer has reported an invalid plan ({type(error).__name__}: {str(error)[:200]})"
        ) from error
