# SPDX-License-Identifier: Apache-2.0
"""The last events and the last minutes of a pool, of bounded size. Both are derived from its
statuses, as a controller reports no events.

A worker that leaves without draining counts as dead, since a controller drops silent members.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.live.pool_view import JobGroup, PoolView

EVENTS_MAX = 200
ENDED_MAX = 32
POINTS_MAX = 900  # 15 minutes, at one point a second
TRAINERS_MAX = 24  # per point


@dataclass(frozen=True, slots=True)
class EventView:
    """An event. ``at`` is the arrival time of the status that shows it, in seconds since 1970."""

    sequence: int
    at: float
    kind: str
    text: str
    trainer: str | None
    worker: str | None


class EventLog:
    """Confined to the thread that takes the statuses; other threads may use the result of
    ``events``."""

    def __init__(self) -> None:
        self._events: deque[EventView] = deque(maxlen=EVENTS_MAX)
        self._last: PoolView | None = None
        self._sequence = 0
        self.counts: Counter[str] = Counter()  # of all events seen, by kind

    def add(self, view: PoolView) -> None:
        """Take the next status. A status of another controller restarts the events."""
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
        """Return the events, newest last."""
        return tuple(self._events)


class Change(NamedTuple):
    """An event without its time and number."""

    kind: str
    text: str
    trainer: str | None = None
    worker: str | None = None


def changes_between(before: PoolView, after: PoolView) -> Iterator[Change]:
    """Yield the changes. Joins precede assignments, so that an assigned worker is known."""
    yield from _arrivals(before, after)
    yield from _assignments(before, after)
    yield from _hedges(before, after)
    yield from _plans(before, after)
    yield from _departures(before, after)
    yield from _scaling(before, after)


def _arrivals(before: PoolView, after: PoolView) -> Iterator[Change]:
    known = _ids(before)
    for worker in after.workers:
        if worker.id not in known:
            yield Change("worker_joined", f"worker {worker.name} joined", worker=worker.id)
    for trainer in after.trainers:
        if trainer.id not in known:
            text = f"{trainer.job} of {trainer.name} joined"
            yield Change("trainer_joined", text, trainer=trainer.id)


def _assignments(before: PoolView, after: PoolView) -> Iterator[Change]:
    worked_for = {worker.id: worker.works_for for worker in before.workers}
    for worker in after.workers:
        now = worker.works_for
        if now == worked_for.get(worker.id):
            continue
        if now is not None:
            text = f"worker {worker.name} works for {after.job_title(now)}"
        else:
            text = f"worker {worker.name} has no job"
        yield Change("assigned", text, trainer=now, worker=worker.id)


def _hedges(before: PoolView, after: PoolView) -> Iterator[Change]:
    hedged = {trainer.id: trainer.hedged_batches for trainer in before.trainers}
    for trainer in after.trainers:
        count = trainer.hedged_batches - hedged.get(trainer.id, trainer.hedged_batches)
        if count > 0:
            batches = "1 late batch" if count == 1 else f"{count} late batches"
            job = f"{trainer.job} of {trainer.name}"
            text = f"{batches} of {job} also requested from a second worker"
            yield Change("hedged", text, trainer=trainer.id)


def _plans(before: PoolView, after: PoolView) -> Iterator[Change]:
    changes = {trainer.id: trainer.plan_changes for trainer in before.trainers}
    for trainer in after.trainers:
        if trainer.plan_changes > changes.get(trainer.id, trainer.plan_changes):
            text = f"{trainer.job} of {trainer.name} now moves other calls to the workers"
            yield Change("replanned", text, trainer=trainer.id)


def _departures(before: PoolView, after: PoolView) -> Iterator[Change]:
    there = _ids(after)
    for worker in before.workers:
        if worker.id in there:
            continue
        if worker.state == "draining":
            yield Change("worker_left", f"worker {worker.name} left", worker=worker.id)
        else:
            text = f"worker {worker.name} disappeared without draining"
            if worker.works_for is not None:
                text += f"; it worked for {before.job_title(worker.works_for)}"
            yield Change("worker_died", text, trainer=worker.works_for, worker=worker.id)
    for trainer in before.trainers:
        if trainer.id not in there:
            text = f"{trainer.job} of {trainer.name} left"
            yield Change("trainer_left", text, trainer=trainer.id)


def _ids(view: PoolView) -> set[str]:
    return {worker.id for worker in view.workers} | {trainer.id for trainer in view.trainers}


def _scaling(before: PoolView, after: PoolView) -> Iterator[Change]:
    if before.engine is None or after.engine is None:
        return
    if before.engine.wanted != after.engine.wanted:
        yield Change(
            "scaled",
            f"engine {after.engine.name}: {after.engine.wanted} workers wanted, "
            f"{before.engine.wanted} before; {after.engine.reason}",
        )


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job whose ranks have all left. ``seen_s`` is the time from its first status to its last, in
    seconds, ``ranks`` has the ids of its trainers, and ``verdict`` is the last one while it
    requested batches."""

    id: str
    title: str
    user: str | None
    ranks: tuple[str, ...]
    ended_at: float
    seen_s: float
    delivered_batches: int
    verdict: str


class EndedJobs:
    """The jobs that have left the pool, newest last. Confined to the thread that takes the
    statuses; other threads may use the result of ``jobs``."""

    def __init__(self) -> None:
        self._ended: deque[EndedJob] = deque(maxlen=ENDED_MAX)
        self._controller = ""
        self._first_at: dict[str, float] = {}  # by job that is there
        self._last: dict[str, JobGroup] = {}
        self._verdicts: dict[str, str] = {}

    def add(self, view: PoolView) -> None:
        """Take the next status. A status of another controller forgets the jobs."""
        if self._controller != view.controller:
            self._controller = view.controller
            for kept in (self._ended, self._first_at, self._last, self._verdicts):
                kept.clear()
        there = {group.id: group for group in view.job_groups()}
        for ended in [one for one in self._ended if one.id in there]:  # it was silent for a while
            self._ended.remove(ended)
        for identity in self._last.keys() - there.keys():
            self._ended.append(self._end(self._last[identity], view.at))
        for identity, group in there.items():
            self._first_at.setdefault(identity, view.at)
            if not group.is_idle:
                self._verdicts[identity] = group.verdict().text
        self._last = there

    def _end(self, group: JobGroup, at: float) -> EndedJob:
        seen_s = at - self._first_at.pop(group.id)
        return EndedJob(
            id=group.id,
            title=group.title,
            user=group.ranks[0].user,
            ranks=tuple(rank.id for rank in group.ranks),
            ended_at=at,
            seen_s=seen_s,
            delivered_batches=group.total("delivered_batches"),
            verdict=self._verdicts.pop(group.id, "it requested no batches"),
        )

    def jobs(self) -> tuple[EndedJob, ...]:
        return tuple(self._ended)


class PoolHistory:
    """The last minutes as points: of the pool, and of the trainers that receive the most batches.
    Confined to the thread that takes the statuses."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)
        self._sequence = 0

    def add(self, view: PoolView) -> None:
        self._sequence += 1
        totals = view.totals()
        busiest = sorted(view.trainers, key=lambda one: one.batches_per_s or 0.0, reverse=True)
        self._points.append(
            {
                "sequence": self._sequence,
                "at": round(view.at, 3),
                "batches_per_s": _short(totals["batches_per_s"]),
                "bytes_per_s": _short(totals["bytes_per_s"]),
                "waited_share": _short(totals["waited_share"]),
                "workers": totals["workers"],
                "workers_serving": totals["workers_by_state"]["serving"],
                "workers_wanted": totals["workers_wanted"],
                "trainers": {
                    one.id: [_short(one.batches_per_s), _short(one.waited_share)]
                    for one in busiest[:TRAINERS_MAX]
                },
            }
        )

    def points(self) -> tuple[dict[str, Any], ...]:
        """Return the points, oldest first. Callers must not change them."""
        return tuple(self._points)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
