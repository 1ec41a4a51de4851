# SPDX-License-Identifier: Apache-2.0
"""Who is told of the steps of this process's loaders: traces, telemetry, profilers.

Watchers belong to the process, as profilers do: a trace is begun beside loaders that exist already,
and a program under `penstock trace` does not know of it. A forked child has none. torch.profiler
and Nsight show a range for each batch, and what a wait was for; the ranges of the wait and of
unpacking, inside of it, are native.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock import _C
from penstock.loader.step_times import PARTS, WAITING_PARTS

# Of a batch that the trainer makes, by the names of counters.
_OWN_PARTS = ("step_dataset_s", "step_collate_s", "step_device_s")
# Batches that one call may take from the stream and still be told of; looking ahead takes several.
_RECORDS_MAX = 1024
_WAIT_SHOWN_S = 1e-4


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """When a batch was where, in seconds of ``time.monotonic()``; no instant is before the last.

    ``worker`` is the number of a local worker, the identity of a pool's, and None where the trainer
    itself made the batch. ``bytes`` is 0 there.
    """

    epoch: int
    sequence: int
    worker: int | None
    bytes: int
    asked_at: float
    begun_at: float
    dataset_until: float
    collate_until: float
    made_at: float
    arrived_at: float
    staged_at: float

    @staticmethod
    def of(record: dict[str, Any]) -> MadeBatch:
        """Of a record as a stream has it."""
        made_at = record["made_at"]
        collate_until = made_at - record["prefix_s"]
        dataset_until = collate_until - record["collate_s"]
        arrived_at = max(made_at, record["arrived_at"])
        return MadeBatch(
            record["epoch"],
            record["sequence"],
            record["worker"],
            record["bytes"],
            record["asked_at"],
            dataset_until - record["dataset_s"],
            dataset_until,
            collate_until,
            made_at,
            arrived_at,
            max(arrived_at, record["staged_at"]),
        )

    @staticmethod
    def of_trainer(
        epoch: int, sequence: int, at: float, dataset_s: float, collate_s: float, device_s: float
    ) -> MadeBatch:
        """Of a batch that the trainer makes in the call that begins ``at``."""
        fetched_at = at + dataset_s
        made_at = fetched_at + collate_s
        staged_at = made_at + device_s
        return MadeBatch(
            epoch, sequence, None, 0, at, at, fetched_at, made_at, made_at, made_at, staged_at
        )


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A call by which a program asked a loader for its next batch, and what came meanwhile.

    Instants are seconds of ``time.monotonic()``. ``number`` is that of the batch in its epoch, from
    0. ``has_batch`` is False where the call ended the epoch or raised. ``batches`` came in this
    call or, by looking ahead, since the last one. ``ready`` ones are here and not taken, ``asked``
    are asked for and not here. ``ranks`` is the time in which the rank waited for others, and for
    its own batch. ``is_own`` where the trainer makes the batches, with ``num_workers=0``.
    """

    loader: weakref.ref[Any]
    epoch: int
    number: int
    entered_at: float
    left_at: float
    has_batch: bool
    batches: tuple[MadeBatch, ...] = ()
    ready: int = 0
    asked: int = 0
    ranks: tuple[float, float] | None = None
    is_own: bool = False


Watcher = Callable[[WatchedStep], None]


class Steps(Protocol):
    """An iterator, as its steps are watched."""

    watched_loader: weakref.ref[Any]
    watched_by: object  # the watchers for whom batches are recorded
    ranks_window: tuple[float, float] | None  # of its last wait for other ranks
    makes_batches: bool  # in the trainer itself
    _num_yielded: int
    _progress: Any

    def record_steps(self, count_max: int) -> None: ...

    def step_records(self) -> list[dict[str, Any]]: ...

    def counters(self) -> dict[str, Any]: ...


_watchers: tuple[Watcher, ...] = ()
_lock = threading.Lock()


def add_watcher(watcher: Watcher) -> None:
    """Has ``watcher`` called at the end of each step of this process's loaders, by the thread that
    made it."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)


def remove_watcher(watcher: Watcher) -> None:
    """Does nothing for one that was not added. A call of it may still go on in another thread."""
    global _watchers
    with _lock:
        _watchers = tuple(one for one in _watchers if one != watcher)


def _forget_watchers() -> None:
    global _watchers, _lock
    _watchers, _lock = (), threading.Lock()


os.register_at_fork(after_in_child=_forget_watchers)


def are_watched() -> bool:
    """Whether somebody looks at the steps that this thread takes. Asked for each batch."""
    return bool(_watchers) or _C.is_profiled()


def watched(steps: Steps, take: Callable[[], Any]) -> Any:
    """What ``take`` returns or raises, which is a step of ``steps``."""
    if _C.is_profiled():
        return in_batch_range(steps, lambda: _told(steps, take))
    return _told(steps, take)


def _told(steps: Steps, take: Callable[[], Any]) -> Any:
    watchers = _watchers
    if not watchers:
        return take()
    if steps.watched_by is not watchers:
        steps.watched_by = watchers
        steps.record_steps(_RECORDS_MAX)
    epoch, number = steps._progress.epoch, steps._num_yielded
    before = _own_parts(steps) if steps.makes_batches else []
    has_batch = False
    entered_at = time.monotonic()
    try:
        batch = take()
        has_batch = True
        return batch
    finally:
        left_at = time.monotonic()
        counts = steps.counters()
        made: tuple[MadeBatch, ...] = tuple(map(MadeBatch.of, steps.step_records()))
        if steps.makes_batches and has_batch:
            spent = (after - part for after, part in zip(_own_parts(steps), before, strict=True))
            made = (MadeBatch.of_trainer(epoch, number, entered_at, *spent),)
        ranks = steps.ranks_window
        step = WatchedStep(
            steps.watched_loader,
            epoch,
            number,
            entered_at,
            left_at,
            has_batch,
            made,
            counts.get("ready", 0),
            counts.get("outstanding", 0),
            ranks if ranks is not None and ranks[0] >= entered_at else None,
            steps.makes_batches,
        )
        for watcher in watchers:
            watcher(step)


def _own_parts(steps: Steps) -> list[float]:
    counts = steps.counters()
    return [counts.get(name, 0.0) for name in _OWN_PARTS]


def in_batch_range(steps: Steps, take: Callable[[], Any]) -> Any:
    """What ``take`` returns, in a range with the number of the batch in its epoch.

    What a wait was mostly for is known when it is over, and shown by an empty range after it.
    """

    def marked() -> Any:
        before = dict(steps.counters())  # with num_workers=0 they go on counting
        batch = take()
        after = steps.counters()
        waits = {
            name: after.get(f"step_{name}", 0.0) - before.get(f"step_{name}", 0.0)
            for name in WAITING_PARTS
        }
        longest = max(waits, key=lambda name: waits[name])
        if waits[longest] >= _WAIT_SHOWN_S:
            _C.in_profiler_range(f"penstock: waited for {PARTS[longest]}", _nothing)
        return batch

    return _C.in_profiler_range(f"penstock: batch {steps._num_yielded}", marked)


def _nothing() -> None: ...
