# SPDX-License-Identifier: Apache-2.0
"""Steps as events of Chrome's trace format, which chrome://tracing and Perfetto read.

The tracks are threads of the trainer's process: the trainer, each worker, the wire, the copy to the
device. Their numbers are beyond those of real threads, so that the events can stand beside those of
torch.profiler, whose slices would cross ours on one track.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.loader.watched_steps import MadeBatch
from penstock.observing.step_waits import stretches
from penstock.observing.traced_step import TracedStep

FIRST_TRACK = 1 << 22  # Linux has no thread with this number or a larger one
CATEGORY = "penstock"

# What the trainer's slices are called, by the parts of a step.
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
# Of the trainer itself, with num_workers=0.
_OWN_SLICES = {
    "worker_s": "loader",
    "dataset_s": "dataset",
    "collate_s": "collate",
    "device_s": "copy to the device",
}

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Whose trace it is. ``base_ns`` is the clock of time.monotonic() where the trace's is 0."""

    pid: int
    base_ns: int
    process_name: str


def events_of(steps: Sequence[TracedStep], place: Place) -> list[Event]:
    """The events of steps in the order in which they ended."""
    return list(_Writer(place).write(steps))


class _Tracks:
    """Numbers for tracks, in the order in which they are first named, and their metadata."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, rank: int, name: str) -> int:
        """``rank`` is where the track stands among others: the trainer's first."""
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
    """Places side by side for slices that overlap and are of one kind."""

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
        # A loader that is read by another's dataset is inside of the other's step.
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
        """Those in which batches came that may have been here before the step's own."""
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
        # In the order of their ends. The begin is the end less what the making took: where the end
        # is when the trainer heard of it, a late one puts a batch behind those that followed it.
        for step, batch in sorted(made, key=lambda one: one[1].made_at):
            tid = self._tracks.number(1, f"{step.prefix}{worker_name(batch.worker)}")
            # The clock of a worker elsewhere is known to some microseconds.
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
        """An arrow from the end of a batch's making to the end of the call that was given it."""
        self._flow_id += 1
        event = {"cat": CATEGORY, "name": "batch", "id": self._flow_id, "pid": self._place.pid}
        # A nanosecond before the end the slice is still the enclosing one.
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
        """Nanoseconds of the trace's clock: whole ones, by which slices end where others begin."""
        return round(instant * 1e9) - self._place.base_ns


_OVERTAKING_MAX = 64  # steps after one that are looked through for a batch that was here before its


def worker_name(worker: int | None) -> str:
    """As `penstock status` names a pool's; a local worker's number is a small one."""
    assert worker is not None
    return f"worker {worker}" if worker < 1 << 16 else f"worker {worker:016x}"


def _span(batch: MadeBatch, kind: str) -> tuple[float, float]:
    if kind == "wire":
        return batch.made_at, batch.arrived_at
    return batch.arrived_at, batch.staged_at


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
