# SPDX-License-Identifier: Apache-2.0
"""The time of a trainer's steps by part, and the times of its workers and samples.

A stream counts the parts of each step in native code (csrc/loader/step_ledger.h), and
:func:`step_times` reads its counters. With ``num_workers=0`` the program's thread makes the
batches, and :class:`InProcessLedger` counts by the same names. :class:`WorkTimes` keeps the figures
of iterators that have ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from penstock import _C
from penstock.tuning.observation import format_time

# Display names of the parts of a step, by the fields of StepTimes.
PARTS = {
    "compute_s": "computing",
    "dataset_s": "the dataset",
    "collate_s": "collating",
    "prefix_s": "calls moved by offload()",
    "worker_s": "a free worker",
    "wire_s": "the wire",
    "device_s": "the copy to the device",
    "order_s": "the batch whose turn it is",
    "ranks_s": "other ranks",
    "loader_s": "the loader",
}
WAITING_PARTS = tuple(name for name in PARTS if name not in ("compute_s", "loader_s"))
_SLOW_SAMPLES_MAX = 8
_WORKERS_MAX = 4096  # workers of a pool join and leave

Totals = TypeVar("Totals", bound="FieldSums")


class FieldSums:
    """Base for dataclasses whose fields can all be added and subtracted."""

    __slots__ = ()

    def __add__(self: Totals, other: Totals) -> Totals:
        """Return the sum of both counts, of two loaders or of two windows."""
        return type(self)(*(mine + theirs for mine, theirs in _pairs(self, other)))

    def __sub__(self: Totals, before: Totals) -> Totals:
        """Return the counts since ``before``, an earlier value of the same object."""
        return type(self)(*(mine - theirs for mine, theirs in _pairs(self, before)))


def _pairs(first: Any, second: Any) -> list[tuple[Any, Any]]:
    return [(getattr(first, one.name), getattr(second, one.name)) for one in fields(first)]


@dataclass(frozen=True, slots=True)
class StepTimes(FieldSums):
    """Seconds of a number of steps by part, added up. Every second is in exactly one field.

    A step lasts from one batch to the next. ``compute_s`` is the program's part and ``loader_s``
    the loader's work on the program's thread; the other parts are waiting time, attributed to the
    stage in which the awaited batch was.

    Attributes:
        steps (int): Number of steps.
        compute_s (float): From the delivery of a batch to the request for the next one.
        dataset_s (float): Waiting until the samples were read.
        collate_s (float): Waiting until the samples were a batch in shared memory.
        prefix_s (float): Waiting until the calls moved by :func:`penstock.offload` had run.
        worker_s (float): Waiting until a worker started to make the batch, because all were busy or
            had to start.
        wire_s (float): Waiting until the last byte of the batch had arrived.
        device_s (float): Waiting until the batch was pinned, or its copy to the device had started.
        order_s (float): Waiting while a later batch was ready; ``in_order=False`` avoids this.
        ranks_s (float): Waiting for other ranks, where all take the same steps.
        loader_s (float): The loader's work on the program's thread.
    """

    steps: int = 0
    compute_s: float = 0.0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    worker_s: float = 0.0
    wire_s: float = 0.0
    device_s: float = 0.0
    order_s: float = 0.0
    ranks_s: float = 0.0
    loader_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return float(sum(getattr(self, name) for name in PARTS))

    @property
    def waiting_s(self) -> float:
        """Seconds of the waiting parts: all but ``compute_s`` and ``loader_s``."""
        return float(sum(getattr(self, name) for name in WAITING_PARTS))

    @property
    def waiting_share(self) -> float:
        """Waiting time as a share of the total, from 0 to 1; 0 before the first step."""
        return self.waiting_s / self.total_s if self.total_s > 0 else 0.0

    def __str__(self) -> str:
        if self.steps == 0:
            return "no steps have been counted"
        step_s, total_s = self.total_s / self.steps, self.total_s

        def format_part(name: str) -> str:
            seconds = getattr(self, name)
            return f"{format_time(seconds / self.steps)} ({100 * seconds / total_s:.0f} %)"

        text = (
            f"a step took {format_time(step_s)}: {format_part('compute_s')} computing, "
            f"{format_part('loader_s')} in the loader"
        )
        waited = {name: getattr(self, name) for name in WAITING_PARTS}
        shown = sorted((name for name in waited if waited[name] > 0), key=lambda n: -waited[n])
        if not shown:
            return f"{text}, and no waiting"
        return f"{text}, and waiting for " + ", ".join(
            f"{PARTS[name]} {format_part(name)}" for name in shown
        )


@dataclass(frozen=True, slots=True)
class WorkerTimes(FieldSums):
    """Times of one worker.

    Attributes:
        batches (int): Delivered batches that it made.
        dataset_s (float): Seconds for their samples.
        collate_s (float): Seconds for collating them.
        prefix_s (float): Seconds for calls moved by :func:`penstock.offload`.
        wire_s (float): Seconds that the batches were on the wire.
        waited_s (float): Seconds that the trainer waited for them.
    """

    batches: int = 0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    wire_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlowSample:
    """A sample that took a worker long to read.

    Attributes:
        seconds (float): Time that it took.
        index (int | None): Index in the dataset, if the batch was requested by numbers.
        batch (int): Number of the batch in its epoch, from 0.
        place (int | None): Position in the batch, from 0. None if the entry stands for all samples
            of the batch because they were not timed separately: samples of an iterable dataset, of
            ``__getitems__`` or ``fetch_threads``, and samples that take less than 20 µs.
        worker (int): Number of the worker, or its identity in a pool; 0 with ``num_workers=0``.
    """

    seconds: float
    index: int | None
    batch: int
    place: int | None
    worker: int

    def __str__(self) -> str:
        if self.index is not None:
            name = f"sample {self.index}"
        elif self.place is not None:
            name = f"sample {self.place} of batch {self.batch}"
        else:
            name = f"the samples of batch {self.batch}"
        return f"{name} took {format_time(self.seconds)}"


def step_times(counters: dict[str, Any]) -> StepTimes:
    """Return the step times in a stream's counters, and remove them from these."""
    return StepTimes(
        counters.pop("steps", 0), **{name: counters.pop(f"step_{name}", 0.0) for name in PARTS}
    )


class WorkTimes:
    """Times of the workers and samples of a loader's iterators, including ended ones. Confined to
    the trainer's thread."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerTimes] = {}
        self.slow_samples: list[SlowSample] = []

    def add(self, workers: Mapping[int, tuple[Any, ...]], samples: list[tuple[Any, ...]]) -> None:
        """Add workers and samples, in the form in which a stream has them."""
        for worker_id, times in workers.items():
            if worker_id in self.workers or len(self.workers) < _WORKERS_MAX:
                known = self.workers.get(worker_id, WorkerTimes())
                self.workers[worker_id] = known + WorkerTimes(*times)
        for seconds, index, _epoch, sequence, place, worker_id in samples:
            self.note_sample(SlowSample(seconds, index, sequence, place, worker_id))

    def is_slow(self, seconds: float) -> bool:
        """Return whether a sample that took ``seconds`` should be noted."""
        noted = self.slow_samples
        return len(noted) < _SLOW_SAMPLES_MAX or seconds > noted[-1].seconds

    def note_sample(self, sample: SlowSample) -> None:
        self.slow_samples.append(sample)
        self.slow_samples.sort(key=lambda one: -one.seconds)
        del self.slow_samples[_SLOW_SAMPLES_MAX:]

    def copy(self) -> WorkTimes:
        copied = WorkTimes()
        copied.workers = dict(self.workers)
        copied.slow_samples = list(self.slow_samples)
        return copied


class InProcessLedger:
    """The time of one iterator's steps by part, with ``num_workers=0``. The program's thread makes
    the batches, so a wait is for the work that it then does. Confined to that thread.

    Adds to the counters of the loader, by a stream's names. ``clock`` is the clock of the batch
    that is being made.
    """

    def __init__(self, counters: Counter[str], work: WorkTimes) -> None:
        self.clock = _C.FetchClock()
        self._counters: dict[str, float] = counters  # type: ignore[assignment]
        self._work = work
        self._left_at = time.perf_counter()
        self._entered_at: float | None = None
        self._placed_s = 0.0  # of this call, already attributed to a part
        self._fetch_at = 0.0

    def begin(self, loading_s: float) -> None:
        """Start the first step, after ``loading_s`` in which the iterator was made."""
        self._left_at = time.perf_counter()
        self._add("step_loader_s", loading_s)

    def enter(self) -> None:
        now = time.perf_counter()
        self._add("step_compute_s", now - self._left_at)
        self._entered_at = now
        self._placed_s = 0.0

    def leave(self, has_batch: bool) -> None:
        assert self._entered_at is not None
        self._left_at = time.perf_counter()
        self._add("step_loader_s", self._left_at - self._entered_at - self._placed_s)
        self._entered_at = None
        if has_batch:
            self._counters["steps"] += 1

    def begin_batch(self) -> None:
        self._fetch_at = time.perf_counter()
        self.clock.begin()

    def end_batch(self, sequence: int, indices: object) -> None:
        """End a batch, requested by ``indices``."""
        spent_s = time.perf_counter() - self._fetch_at
        dataset_s, slowest_s, place = self.clock.times()
        dataset_s = min(dataset_s, spent_s)
        self._place("step_dataset_s", dataset_s)
        self._place("step_collate_s", spent_s - dataset_s)
        if not self._work.is_slow(slowest_s if slowest_s > 0 else dataset_s):
            return
        if slowest_s > 0:
            index = _index_at(indices, place)
            self._work.note_sample(SlowSample(slowest_s, index, sequence, place, 0))
        else:
            self._work.note_sample(SlowSample(dataset_s, None, sequence, None, 0))

    def note(self, part: str, seconds: float) -> None:
        """Add time of this call to ``part``, in addition to the time that :meth:`end_batch`
        placed."""
        self._place(f"step_{part}", seconds)

    @property
    def placed_s(self) -> float:
        """Return the seconds of this call that are attributed to a part."""
        return self._placed_s

    def _place(self, name: str, seconds: float) -> None:
        self._placed_s += seconds
        self._add(name, seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._counters[name] += seconds


def _index_at(indices: object, place: int) -> int | None:
    found = indices[place] if isinstance(indices, list) and place < len(indices) else indices
    return found if isinstance(found, int) else None
