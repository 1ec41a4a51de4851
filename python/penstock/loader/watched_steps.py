# SPDX-License-Identifier: Apache-2.0
"""Watchers of this process's loaders and their steps: traces, telemetry, the doctor, profilers.

Watchers belong to the process, as profilers do: a trace is started when loaders already exist, and
a program under `penstock trace` is not aware of it. A forked child has none. torch.profiler and
Nsight show a range for each batch, and the cause of a wait; the ranges of the wait and of
unpacking, inside of it, are native.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

from penstock import _C
from penstock.loader.step_times import PARTS, WAITING_PARTS

# Parts of a batch that the trainer makes, by the names of counters.
_OWN_PARTS = ("step_dataset_s", "step_collate_s", "step_device_s")
# Batches that one call may take from the stream and still report; looking ahead takes several.
_RECORDS_MAX = 1024
_WAIT_SHOWN_S = 1e-4


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """Times of a batch's stages, in seconds of ``time.monotonic()``, in ascending order.

    ``worker`` is the number of a local worker, the identity of a pool's, and None if the trainer
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
        """Return the times in a record of a stream."""
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
        """Return the times of a batch that the trainer makes in the call that starts ``at``."""
        fetched_at = at + dataset_s
        made_at = fetched_at + collate_s
        staged_at = made_at + device_s
        return MadeBatch(
            epoch, sequence, None, 0, at, at, fetched_at, made_at, made_at, made_at, staged_at
        )


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """Call by which a program requested its next batch from a loader, and the batches received in
    it.

    Instants are seconds of ``time.monotonic()``. ``number`` is the batch's number in its epoch,
    from 0. ``has_batch`` is False if the call ended the epoch or raised. ``batches`` arrived in
    this call or, by looking ahead, since the last one. ``ready`` ones are here and not taken,
    ``asked`` are requested and not here. ``ranks`` is the time in which the rank waited for others,
    and for its batch. ``is_own`` if the trainer makes the batches, with ``num_workers=0``.
    ``cpu_s`` are the seconds that the thread was on a CPU in the call. ``iter_s`` is the duration
    of the epoch's ``iter()``, and None for all steps but the first.
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
    cpu_s: float = 0.0
    iter_s: float | None = None


class Steps(Protocol):
    """Iterator, as seen by the watchers of its steps."""

    watched_loader: weakref.ref[Any]
    iter_s: float | None  # the duration of iter(), until the first step
    watched_by: object  # the watchers for which batches are recorded
    ranks_window: tuple[float, float] | None  # of its last wait for other ranks
    makes_batches: bool  # in the trainer itself
    _num_yielded: int
    _progress: Any

    def record_steps(self, count_max: int) -> None: ...

    def step_records(self) -> list[dict[str, Any]]: ...

    def counters(self) -> dict[str, Any]: ...


# Called with a step, its iterator, and its batch, which is None if there is none. An exception is
# raised by the program's call.
Watcher = Callable[[WatchedStep, Steps, Any], None]
LoaderWatcher = Callable[[Any], None]
# Called with a loader and its batch; returns what the program receives, with the same content.
BatchView = Callable[[weakref.ref[Any], Any], Any]

_Called = TypeVar("_Called", bound=Callable[..., Any])


class Watchers(Generic[_Called]):
    """Functions to call; a forked child starts without any. Thread-safe."""

    now: tuple[_Called, ...]

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def add(self, watcher: _Called) -> None:
        with self._lock:
            self.now = (*self.now, watcher)

    def remove(self, watcher: _Called) -> None:
        """Remove ``watcher``, if it was added. A call of it may still be running in another
        thread."""
        with self._lock:
            self.now = tuple(one for one in self.now if one != watcher)

    def forget(self) -> None:
        self.now = ()
        self._lock = threading.Lock()


# Called at the end of each step of this process's loaders, by the thread that made it.
step_watchers = Watchers[Watcher]()
# Called with each new loader of this process, by its constructor. They may assign options, as the
# program may.
loader_watchers = Watchers[LoaderWatcher]()
# Called with each batch of a step that is watched.
batch_views = Watchers[BatchView]()


def note_new_loader(loader: Any) -> None:
    for watcher in loader_watchers.now:
        watcher(loader)


def are_watched() -> bool:
    """Return whether this thread's steps are watched. Called for each batch."""
    return bool(step_watchers.now) or _C.is_profiled()


def watched(steps: Steps, take: Callable[[], Any]) -> Any:
    """Return or raise the result of ``take``, which is a step of ``steps``."""
    if _C.is_profiled():
        return in_batch_range(steps, lambda: _notify_watchers(steps, take))
    return _notify_watchers(steps, take)


def _notify_watchers(steps: Steps, take: Callable[[], Any]) -> Any:
    watchers = step_watchers.now
    if not watchers:
        return take()
    if steps.watched_by is not watchers:
        steps.watched_by = watchers
        steps.record_steps(_RECORDS_MAX)
    epoch, number = steps._progress.epoch, steps._num_yielded
    iter_s, steps.iter_s = steps.iter_s, None
    before = _own_parts(steps) if steps.makes_batches else []
    batch, has_batch = None, False
    cpu_s, entered_at = time.thread_time(), time.monotonic()
    try:
        batch = take()
        has_batch = True
    finally:
        left_at, cpu_s = time.monotonic(), time.thread_time() - cpu_s
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
            cpu_s,
            iter_s,
        )
        for watcher in watchers:
            watcher(step, steps, batch)
    for view in batch_views.now:
        batch = view(steps.watched_loader, batch)
    return batch


class TorchSteps:
    """The steps of a torch iterator, of which only the calls are known."""

    makes_batches = False
    ranks_window: tuple[float, float] | None = None

    def __init__(self, iterator: Any, loader: Any) -> None:
        self.watched_loader = weakref.ref(loader)
        self.watched_by: object = ()
        self.iter_s: float | None = None
        self._num_yielded = 0
        self._progress = SimpleNamespace(epoch=-1)
        self._iterator = weakref.ref(iterator)  # which holds this object
        self._next_data = type(iterator)._next_data

    def begin_steps(self, iter_s: float) -> None:
        self.iter_s = iter_s
        self._num_yielded = 0
        self._progress.epoch += 1

    def next_data(self) -> Any:
        take = functools.partial(self._next_data, self._iterator())
        batch = watched(self, take) if are_watched() else take()
        self._num_yielded += 1
        return batch

    def record_steps(self, count_max: int) -> None: ...

    def step_records(self) -> list[dict[str, Any]]:
        return []

    def counters(self) -> dict[str, Any]:
        return {}


def watch_torch_iterator(iterator: Any, loader: Any) -> None:
    """Have watchers called for the steps of a torch iterator, too."""
    steps = TorchSteps(iterator, loader)
    vars(iterator).update(_next_data=steps.next_data, begin_steps=steps.begin_steps)


def _own_parts(steps: Steps) -> list[float]:
    counts = steps.counters()
    return [counts.get(name, 0.0) for name in _OWN_PARTS]


def in_batch_range(steps: Steps, take: Callable[[], Any]) -> Any:
    """Return the result of ``take``, in a range with the number of the batch in its epoch.

    The main cause of a wait is known when it is over, and shown by an empty range after it.
    """

    def marked() -> Any:
        before = dict(steps.counters())  # with num_workers=0 they keep counting
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
