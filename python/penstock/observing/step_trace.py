# SPDX-License-Identifier: Apache-2.0
"""``penstock.trace()``: a window of steps as a file in Chrome's trace format, for chrome://tracing
and Perfetto.

The tracks are threads of the trainer's process: the trainer, each worker, the wire, the copy to the
device. Their numbers exceed all real thread ids, so that a file can contain these events and
torch.profiler's, whose slices would cross ours on a shared track.

`stretches` divides a call for a batch by cause, with the same rules as csrc/loader/step_ledger.h.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from penstock._version import __version__
from penstock.loader.options import title_of
from penstock.loader.watched_steps import MadeBatch, WatchedStep, step_watchers
from penstock.observing.trace_file import BASE, check_writable, write_trace
from penstock.program_line import warn
from penstock.ranks.sharding import JobRank

STEPS_MAX = 1_000_000
STEPS = 200
FIRST_TRACK = 1 << 22  # Linux has no thread with this number or a larger one
CATEGORY = "penstock"
# The number of later steps that are searched for a batch that arrived earlier.
_OVERTAKING_MAX = 64

# The names of the trainer's slices, by the parts of a step.
_TRAINER_SLICES = {
    "worker_s": "wait for a free worker",
    "dataset_s": "wait for the dataset",
    "collate_s": "wait for collating",
    "prefix_s": "wait for moved calls",
    "wire_s": "wait for the wire",
    "device_s": "wait for the copy to the device",
    "order_s": "wait for the batch whose turn it is",
    "ranks_s": "wait for other ranks",
    "loader_s": "loader",
}
# The names of the trainer's slices with num_workers=0.
_OWN_SLICES = {
    "worker_s": "loader",
    "dataset_s": "dataset",
    "collate_s": "collate",
    "device_s": "copy to the device",
}

Event = dict[str, Any]


def trace(path: str | os.PathLike[str], *, steps: int = STEPS, skip: int = 0) -> StepTrace:
    """Return a context manager that traces the steps of this process's loaders to a file.

    The tracks are the trainer (computing, waiting by cause, the loader's work), each worker
    (dataset, collating, moved calls), the wire, and the copy to the device. Arrows lead from the
    making of a batch to the call that returned it. Counters show the batches that are ready, the
    batches requested, and megabytes per second. Batches that were made but not delivered in the
    window are left out. Timestamps use the Unix clock, as in torch.profiler, so
    :func:`penstock.merge_traces` can show both together.

    The file is written when ``steps`` batches were delivered, or else at the end of the block, also
    after an exception or Ctrl-C. In the first case a failure to write is a warning, so training
    continues. Tracing adds about 20 microseconds to a step. Loaders whose workers are already
    running are traced too; forked children are not.

    Args:
        path (str | os.PathLike): File to write, in Chrome's trace format (JSON), compressed if its
            name ends in ".gz". https://ui.perfetto.dev and chrome://tracing open it. If this
            process is one of several ranks, the rank is inserted before the first suffix:
            ``trace.rank3.json``.
        steps (int): Number of batches to trace, over all loaders, 1 to 1,000,000. Default: 200.
        skip (int): Number of batches to leave out first, 0 to 1,000,000. Default: 0.

    Returns:
        StepTrace: Context manager; its ``path`` is the file written.

    Raises:
        ValueError: If ``steps`` or ``skip`` is out of range.
        OSError: At the start of the block, if the file cannot be written.

    Example::

        with penstock.trace("trace.json", steps=100, skip=20):
            train(model, loader)
    """
    return StepTrace(path, steps, skip)


class StepTrace:
    """Context manager that traces steps; returned by :func:`penstock.trace`. Can be used once.

    Attributes:
        path (pathlib.Path | None): File that was written; None before.
        file_bytes (int): Size of that file in bytes; 0 before.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: int,
        skip: int,
        when_written: Callable[[StepTrace], None] | None = None,
    ) -> None:
        _check_count("steps", steps, 1)
        _check_count("skip", skip, 0)
        self._asked_path = Path(path)
        self._window = StepWindow(steps, skip)
        self._when_written = when_written
        self._lock = threading.Lock()
        self._owner_pid = 0  # until the block starts
        self._is_ended = False
        self.path: Path | None = None
        self.file_bytes = 0

    @property
    def step_count(self) -> int:
        """Number of batches traced so far."""
        return self._window.batch_count

    def __enter__(self) -> StepTrace:
        if self._owner_pid:
            raise ValueError("this trace was already started; penstock.trace() creates another")
        check_writable(self._asked_path.absolute())
        self._owner_pid = os.getpid()
        # The monotonic clock's time when the Unix clock showed a whole second.
        base_s = int(time.time())
        self._unix_base_ns = base_s * 1_000_000_000
        self._base_ns = self._unix_base_ns - (time.time_ns() - time.monotonic_ns())
        step_watchers.add(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() == self._owner_pid and self._end():
            self._write()

    def _note(self, step: WatchedStep, *_: Any) -> None:
        if self._window.note(step) and self._end():
            try:
                self._write()
            except OSError as error:
                warn(f"the trace of {self.step_count} steps was not written: {error}")

    def _end(self) -> bool:
        """End the trace; return whether this call ended it."""
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
        step_watchers.remove(self._note)
        return is_first

    def _write(self) -> None:
        job = JobRank.of(None, None)
        path = path_of_rank(self._asked_path, job)
        rank_name = f", rank {job.rank}" if job.world_size > 1 else ""
        place = Place(os.getpid(), self._base_ns, f"{_program_name()}{rank_name}")
        content: dict[str, Any] = {
            "displayTimeUnit": "ms",
            BASE: self._unix_base_ns,
            "penstock": {
                "version": __version__,
                "rank": job.rank,
                "world_size": job.world_size,
                "host": os.uname().nodename,
                "steps": self.step_count,
            },
            "traceEvents": events_of(self._window.steps(), place),
        }
        self.file_bytes = write_trace(path, content)
        self.path = path
        if self._when_written is not None:
            self._when_written(self)


def path_of_rank(path: Path, job: JobRank) -> Path:
    if job.world_size == 1:
        return path
    head, dot, tail = path.name.partition(".")
    return path.with_name(f"{head}.rank{job.rank}{dot}{tail}")


def _program_name() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"


def _check_count(name: str, count: object, least: int) -> None:
    if type(count) is not int or not least <= count <= STEPS_MAX:
        raise ValueError(f"{name} must be an integer from {least} to {STEPS_MAX}, got {count!r}")


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step, with the names of its tracks. ``place`` is its index in the window, ``prefix`` starts
    the names of its loader's tracks, and ``thread_suffix`` distinguishes the trainer's threads."""

    seen: WatchedStep
    place: int
    loader_name: str
    prefix: str
    thread_id: int
    thread_suffix: str


class StepWindow:
    """Collects ``step_count`` batches after the first ``skip_count``, and the calls between them
    that ended an epoch. Thread-safe."""

    def __init__(self, step_count: int, skip_count: int) -> None:
        self._lock = threading.Lock()
        self._step_count = step_count
        self._left_out = skip_count
        self._noted: list[tuple[WatchedStep, int, int]] = []  # with the loader and the thread
        self._batch_count = 0
        self._loaders: list[tuple[weakref.ref[Any], str]] = []
        self._threads: list[int] = []

    def note(self, step: WatchedStep) -> bool:
        """Collect a step, unless it is skipped. Returns whether the window is full."""
        with self._lock:
            if self._left_out > 0:
                self._left_out -= step.has_batch
                return False
            if self._batch_count >= self._step_count:
                return True
            thread_id = threading.get_ident()
            if thread_id not in self._threads:
                self._threads.append(thread_id)
            self._noted.append((step, self._loader_number(step.loader), thread_id))
            self._batch_count += step.has_batch
            return self._batch_count >= self._step_count

    @property
    def batch_count(self) -> int:
        return self._batch_count

    def steps(self) -> list[TracedStep]:
        """Return the steps in the order of their ends."""
        with self._lock:
            several = len(self._loaders) > 1
            names = [
                f"loader {number} ({kind})" for number, (_, kind) in enumerate(self._loaders, 1)
            ]
            return [
                TracedStep(
                    step,
                    place,
                    names[loader],
                    f"{names[loader]}: " if several else "",
                    thread_id,
                    f" {self._threads.index(thread_id) + 1}" if len(self._threads) > 1 else "",
                )
                for place, (step, loader, thread_id) in enumerate(self._noted)
            ]

    def _loader_number(self, loader: weakref.ref[Any]) -> int:
        for number, (known, _) in enumerate(self._loaders):
            if known == loader:
                return number
        live = loader()
        kind = "gone" if live is None else title_of(live)
        self._loaders.append((loader, kind))
        return len(self._loaders) - 1


@dataclass(frozen=True, slots=True)
class Place:
    """The traced process. ``base_ns`` is the time of time.monotonic() at the trace's time 0."""

    pid: int
    base_ns: int
    process_name: str


def events_of(steps: Sequence[TracedStep], place: Place) -> list[Event]:
    """Return the events of steps that are in the order of their ends."""
    return list(_Writer(place).write(steps))


class _Tracks:
    """Numbers of tracks, in the order of their first use, and their metadata."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, rank: int, name: str) -> int:
        """Return the track's number. ``rank`` is its position among the tracks: the trainer's is
        0."""
        return self._numbers.setdefault((rank, name), FIRST_TRACK + len(self._numbers))

    def metadata(self) -> Iterator[Event]:
        for index, ((_, name), tid) in enumerate(sorted(self._numbers.items())):
            for kind, argument in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": index - (1 << 20)}),
            ):
                event = {"ph": "M", "name": kind, "pid": self._pid, "tid": tid, "ts": 0}
                yield {**event, "args": argument}


class _Lanes:
    """Parallel tracks for overlapping slices of one kind."""

    def __init__(self) -> None:
        self._free_at: list[int] = []

    def take(self, begin: int, end: int) -> int:
        for lane, free_at in enumerate(self._free_at):
            if free_at <= begin:
                self._free_at[lane] = end
                return lane
        self._free_at.append(end)
        return len(self._free_at) - 1


class _Writer:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._tracks = _Tracks(place.pid)
        self._flow_id = 0

    def write(self, steps: Sequence[TracedStep]) -> Iterator[Event]:
        yield {
            "ph": "M",
            "name": "process_name",
            "pid": self._place.pid,
            "tid": 0,
            "ts": 0,
            "args": {"name": self._place.process_name},
        }
        yield from self._trainer(steps)
        yield from self._workers(steps)
        for rank, kind in ((2, "wire"), (3, "copy to the device")):
            yield from self._under_way(steps, rank, kind)
        yield from self._counters(steps)
        yield from self._tracks.metadata()

    # ---- Tracks

    def _trainer(self, steps: Sequence[TracedStep]) -> Iterator[Event]:
        left_at: dict[int, float] = {}
        # If a dataset reads another loader, the inner loader's step lies within the outer one's.
        for step in sorted(steps, key=lambda one: (one.seen.entered_at, -one.seen.left_at)):
            seen = step.seen
            tid = self._trainer_track(step)
            if (since := left_at.get(step.thread_id)) is not None and seen.entered_at > since:
                yield self._slice("compute", tid, since, seen.entered_at, {})
            left_at[step.thread_id] = max(seen.left_at, left_at.get(step.thread_id, 0.0))
            later = [batch for one in self._next_steps(steps, step) for batch in one.seen.batches]
            names = {**_TRAINER_SLICES, **_OWN_SLICES} if seen.is_own else _TRAINER_SLICES
            facts = {"loader": step.loader_name, "epoch": seen.epoch, "batch": seen.number}
            name = f"batch {seen.number}" if seen.has_batch else "end of the epoch"
            yield self._slice(name, tid, seen.entered_at, seen.left_at, facts)
            if not seen.has_batch and not seen.batches:
                continue
            for part, begin, end in stretches(seen, later):
                yield self._slice(names[part], tid, begin, end, {})

    def _next_steps(self, steps: Sequence[TracedStep], step: TracedStep) -> list[TracedStep]:
        """Return the steps whose batches may have arrived before this step's."""
        found: list[TracedStep] = []
        for one in steps[step.place + 1 :]:
            if one.loader_name != step.loader_name:
                continue
            if len(found) == _OVERTAKING_MAX or one.seen.epoch != step.seen.epoch:
                break
            found.append(one)
        return found

    def _workers(self, steps: Sequence[TracedStep]) -> Iterator[Event]:
        made = [(step, batch) for step in steps for batch in step.seen.batches]
        made = [(step, batch) for step, batch in made if batch.worker is not None]
        free_at: dict[int, float] = {}
        # In the order of their ends. The start is the end minus the time of making: if the end is
        # the time at which the trainer was notified, a late notification moves a batch after its
        # successors.
        for step, batch in sorted(made, key=lambda one: one[1].made_at):
            tid = self._tracks.number(1, f"{step.prefix}{worker_name(batch.worker)}")
            # The clock of a remote worker is known to some microseconds.
            begin = max(batch.begun_at, free_at.get(tid, 0.0))
            end = max(begin, batch.made_at)
            free_at[tid] = end
            facts = {"epoch": batch.epoch, "batch": batch.sequence, "bytes": batch.bytes}
            yield self._slice(f"batch {batch.sequence}", tid, begin, end, facts)
            place = begin
            for name, until in (
                ("dataset", batch.dataset_until),
                ("collate", batch.collate_until),
                ("moved calls", batch.made_at),
            ):
                if until > place:
                    yield self._slice(name, tid, place, until, {})
                    place = until
            yield from self._flow(step, tid, end)

    def _under_way(self, steps: Sequence[TracedStep], rank: int, kind: str) -> Iterator[Event]:
        lanes: dict[str, _Lanes] = {}
        batches = [(step, batch) for step in steps for batch in step.seen.batches]
        spans = [
            (*_span(batch, kind), step, batch)
            for step, batch in batches
            if not (kind == "wire" and batch.worker is None)
        ]
        for begin, end, step, batch in sorted(spans, key=lambda one: one[0]):
            if self._at(end) <= self._at(begin):
                continue
            lane = lanes.setdefault(step.prefix, _Lanes()).take(self._at(begin), self._at(end))
            name = f"{step.prefix}{kind}" + (f" {lane + 1}" if lane else "")
            tid = self._tracks.number(rank, name)
            facts = {"epoch": batch.epoch, "bytes": batch.bytes}
            yield self._slice(f"batch {batch.sequence}", tid, begin, end, facts)

    def _flow(self, step: TracedStep, tid: int, made_at: float) -> Iterator[Event]:
        """Yield an arrow from the end of making a batch to the end of the call that received it."""
        self._flow_id += 1
        event = {"cat": CATEGORY, "name": "batch", "id": self._flow_id, "pid": self._place.pid}
        # One nanosecond before its end, the slice is still the enclosing one.
        yield {**event, "ph": "s", "tid": tid, "ts": _us(self._at(made_at) - 1)}
        trainer = self._trainer_track(step)
        given_at = _us(self._at(step.seen.left_at) - 1)
        yield {**event, "ph": "f", "bp": "e", "tid": trainer, "ts": given_at}

    def _counters(self, steps: Sequence[TracedStep]) -> Iterator[Event]:
        before: dict[str, float] = {}
        for step in steps:
            seen = step.seen
            batch_bytes = sum(batch.bytes for batch in seen.batches)
            event = {"ph": "C", "pid": self._place.pid, "tid": 0, "ts": _us(self._at(seen.left_at))}
            counts = {"ready": seen.ready, "asked for": seen.asked}
            yield {**event, "name": f"{step.prefix}batches", "args": counts}
            since = before.get(step.loader_name)
            before[step.loader_name] = seen.left_at
            if since is not None and batch_bytes and seen.left_at > since:
                rate = round(batch_bytes / 1e6 / (seen.left_at - since), 3)
                yield {**event, "name": f"{step.prefix}throughput", "args": {"MB/s": rate}}

    # ---- Events

    def _trainer_track(self, step: TracedStep) -> int:
        return self._tracks.number(0, f"trainer{step.thread_suffix}")

    def _slice(self, name: str, tid: int, begin: float, end: float, facts: Event) -> Event:
        begin_ns, end_ns = self._at(begin), self._at(end)
        event = {"ph": "X", "cat": CATEGORY, "name": name, "pid": self._place.pid, "tid": tid}
        event |= {"ts": _us(begin_ns), "dur": _us(max(0, end_ns - begin_ns))}
        return {**event, "args": facts} if facts else event

    def _at(self, instant: float) -> int:
        """Return the trace's time in whole nanoseconds, so that slices end exactly where the next
        ones start."""
        return round(instant * 1e9) - self._place.base_ns


def worker_name(worker: int | None) -> str:
    """Return the name of a pool worker as in `penstock status`; a local worker's number is
    small."""
    assert worker is not None
    return f"worker {worker}" if worker < 1 << 16 else f"worker {worker:016x}"


def _span(batch: MadeBatch, kind: str) -> tuple[float, float]:
    if kind == "wire":
        return batch.made_at, batch.arrived_at
    return batch.arrived_at, batch.staged_at


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


class Stretch(NamedTuple):
    """Some seconds of a call, from ``begin`` to ``end``; ``part`` is a field of StepTimes."""

    part: str
    begin: float
    end: float


def stretches(step: WatchedStep, later: Sequence[MadeBatch] = ()) -> list[Stretch]:
    """Divide the whole call into parts, in order. ``later`` are the loader's batches after the ones
    of ``step``: once a later batch of the epoch has arrived, the call waits for the order."""
    found: list[Stretch] = []
    place = step.entered_at
    for part, until in _ends(step, later):
        until = min(until, step.left_at)
        if until > place:
            _add(found, Stretch(part, place, until))
            place = until
    if not step.has_batch and not step.batches:
        # The epoch is over. Workers that are not persistent are ended in this call.
        part = "dataset_s" if step.is_own else "loader_s"
        return [Stretch(part, step.entered_at, step.left_at)]
    if place < step.left_at:
        _add(found, Stretch("loader_s", place, step.left_at))
    return found


def _ends(step: WatchedStep, later: Sequence[MadeBatch]) -> Iterator[tuple[str, float]]:
    """Yield the parts of the call with their end times, in order."""
    for place, batch in enumerate(step.batches):
        coming = (*step.batches[place + 1 :], *later)
        order_from = _first_ready(batch, coming)
        for part, until in (
            ("worker_s", batch.begun_at),
            ("dataset_s", batch.dataset_until),
            ("collate_s", batch.collate_until),
            ("prefix_s", batch.made_at),
            ("wire_s", batch.arrived_at),
            ("device_s", batch.staged_at),
        ):
            yield part, min(until, order_from)
        if order_from < batch.staged_at:
            yield "order_s", batch.staged_at
    if step.ranks is not None:
        yield "ranks_s", step.ranks[1]


def _first_ready(batch: MadeBatch, coming: Iterable[MadeBatch]) -> float:
    """Return when the first later batch of the same epoch was ready."""
    return min(
        (
            one.staged_at
            for one in coming
            if one.epoch == batch.epoch and one.sequence > batch.sequence
        ),
        default=float("inf"),
    )


def _add(found: list[Stretch], stretch: Stretch) -> None:
    if found and found[-1].part == stretch.part:
        found[-1] = found[-1]._replace(end=stretch.end)
    else:
        found.append(stretch)
