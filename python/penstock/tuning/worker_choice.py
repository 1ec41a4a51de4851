# SPDX-License-Identifier: Apache-2.0
"""How many workers a loader with ``num_workers="auto"`` has: measured numbers in, a number out.

Worker seconds over trainer seconds of a batch is how many workers keep a trainer busy. That is
where the number goes, by at most twofold steps, since seconds change with the number: workers share
CPUs, disks and networks. A step up that did not shorten the waiting is taken back and tried again
more and more seldom, since the machine may have been busy with something else; a number for which
the trainer waited is not gone down to again. So it settles, until a batch takes a quite different
time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

STALLED_SHARE_MAX = 0.05  # of the trainer's time; below it nothing is gained by more workers
IDLE_SHARE_MIN = 0.5  # of the workers' time; above it fewer would do
_SPARE = 1.25  # workers beyond the ratio of the means, because no two batches take the same time
_CPU_BOUND_SHARE = 0.75
_GAIN_MIN = 0.5  # of what a step up would gain if workers did not get in each other's way
_FIRST_PATIENCE = (
    8  # choices until a step up that was taken back is tried again; then twice as many
)
_OTHER_CONDITIONS = 2.0  # times longer or shorter
_SECONDS_MIN = 1e-3  # of a batch in the trainer; what is shorter is noise


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over a stretch of an epoch in which ``workers`` workers were at work."""

    workers: int
    wait_s: float  # of a batch: the trainer waited for it
    trainer_s: float  # of a batch: the trainer was at work
    worker_s: float  # of a batch: one worker was at work, by the clock
    cpu_share: float | None  # of worker_s: it was on a CPU or waiting for one; None: unknown
    trainer_cpus: float  # that the trainer's process had in use, its waiting included

    @property
    def stalled_share(self) -> float:
        return self.wait_s / max(self.wait_s + self.trainer_s, 1e-9)

    @property
    def idle_share(self) -> float:
        """Of the workers' time."""
        return max(
            0.0, 1 - self.worker_s / max(self.workers * (self.wait_s + self.trainer_s), 1e-9)
        )


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the machine and the loader allow."""

    cpus: int
    waiting_workers: int  # for datasets that wait rather than compute
    shards: int | None = None  # of an iterable dataset; a worker beyond them has nothing to do

    @staticmethod
    def of(cpus: int, shards: int | None = None) -> WorkerLimits:
        return WorkerLimits(cpus, max(cpus, min(4 * cpus, 32)), shards)

    @property
    def first_workers(self) -> int:
        """To begin with, before anything is measured."""
        return max(1, min(2, self.cpus - 1, self.shards or 2))


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """A number of workers, and what it was chosen from. ``str()`` says it in a sentence."""

    workers: int
    reason: Literal["stalled", "settled", "limit", "no gain", "taken back", "idle"]
    measured: Measured
    limit: int  # the most workers that would have been chosen
    limited_by: Literal["CPUs", "shards", "cap"]
    cpus: int
    fewer: Measured | None = None  # for which the trainer waited too long, before

    def __str__(self) -> str:
        seen = self.measured
        stalled = f"the trainer waited {seen.stalled_share:.0%} of the time"
        fewer = self.fewer
        on_limit = {
            "CPUs": f"no more than {self.limit} would have CPUs to run on",
            "shards": f"the dataset has no more than {_counted(self.limit, 'shard')}",
            "cap": f"{self.limit} is the most that is tried",
        }[self.limited_by]
        why = {
            "stalled": f"{stalled} for {seen.workers}",
            "settled": stalled
            + ("" if fewer is None else f", and {fewer.stalled_share:.0%} for {fewer.workers}"),
            "limit": f"{stalled}, but {on_limit}",
            "no gain": f"{stalled}, but more workers were tried and were of no use",
            "taken back": f"{seen.workers} were tried and made batches no faster, {stalled}",
            "idle": f"{stalled} and {seen.workers} were idle {seen.idle_share:.0%} of it",
        }[self.reason]
        on_cpu = "" if seen.cpu_share is None else f", {min(1, seen.cpu_share):.0%} of it on a CPU,"
        return (
            f"{_counted(self.workers, 'worker')}: {why}; a batch takes {_duration(seen.worker_s)} "
            f"of a worker{on_cpu} and {_duration(seen.trainer_s)} of the trainer, and "
            f"{_counted(self.cpus, 'CPU')} {'is' if self.cpus == 1 else 'are'} free to use"
        )


@dataclass(frozen=True, slots=True)
class Lessons:
    """What earlier choices have shown. Empty to begin with."""

    grown_from: Measured | None = None  # the choice before was a step up, and this was before it
    too_few: int = 0  # the trainer waited for this many
    no_more_than: int | None = None
    basis: Measured | None = None  # when these were seen
    kept: int = 0  # choices that kept to no_more_than
    patience: int = _FIRST_PATIENCE


def choose_workers(
    measured: Measured, limits: WorkerLimits, lessons: Lessons
) -> tuple[WorkerChoice, Lessons]:
    """The number of workers to go on with, and the lessons for the next choice."""
    count = measured.workers
    limit, limited_by = _limit(measured, limits)

    def choose(workers: int, reason: Any, fewer: Measured | None = None) -> WorkerChoice:
        return WorkerChoice(workers, reason, measured, limit, limited_by, limits.cpus, fewer)

    before = lessons.grown_from
    if before is not None and not _has_gained(before, measured):
        taken_back = Lessons(
            too_few=min(lessons.too_few, before.workers - 1),
            no_more_than=before.workers,
            basis=before,
            patience=lessons.patience,
        )
        return choose(before.workers, "taken back"), taken_back
    lessons = dataclasses.replace(lessons, grown_from=None)
    if before is None and _is_elsewhere(measured, lessons.basis):
        lessons = Lessons()
    if measured.stalled_share > STALLED_SHARE_MAX:
        if lessons.kept >= lessons.patience:
            lessons = dataclasses.replace(
                lessons, no_more_than=None, kept=0, patience=2 * lessons.patience
            )
        most = limit if lessons.no_more_than is None else min(limit, lessons.no_more_than)
        workers = min(max(_needed(measured), count + max(1, count // 4)), 2 * count, most)
        if workers <= count:
            if count >= limit:
                return choose(count, "limit"), lessons
            return choose(count, "no gain"), dataclasses.replace(lessons, kept=lessons.kept + 1)
        return choose(workers, "stalled"), dataclasses.replace(
            lessons, grown_from=measured, too_few=count, basis=measured
        )
    workers = max(_needed(measured), lessons.too_few + 1)
    if workers < count and measured.idle_share > IDLE_SHARE_MIN:
        return choose(workers, "idle"), lessons
    basis = lessons.basis
    is_of_fewer = basis is not None and basis.workers == lessons.too_few < count
    return choose(count, "settled", basis if is_of_fewer else None), lessons


def _needed(measured: Measured) -> int:
    return max(1, math.ceil(_SPARE * measured.worker_s / max(measured.trainer_s, 1e-6)))


def _limit(measured: Measured, limits: WorkerLimits) -> tuple[int, Any]:
    """The most workers that are of use, and why not more.

    One CPU is left to a trainer that has it in use half of the time. Workers that wait use less
    than a CPU each, those with threads more.
    """
    cpus = max(1, limits.cpus - 1) if measured.trainer_cpus > 0.5 else limits.cpus
    share = 1.0 if measured.cpu_share is None else max(measured.cpu_share, 1e-3)
    most, why = cpus, "CPUs"
    if share < _CPU_BOUND_SHARE:
        most = max(cpus, int(cpus / share))
        if most > limits.waiting_workers:
            most, why = limits.waiting_workers, "cap"
    elif share > 1 / _CPU_BOUND_SHARE:
        most = max(1, int(cpus / share))
    if limits.shards is not None and limits.shards < most:
        return limits.shards, "shards"
    return most, why


def _has_gained(before: Measured, after: Measured) -> bool:
    at_best = before.workers / after.workers
    return after.wait_s <= before.wait_s * (1 - _GAIN_MIN * (1 - at_best))


def _is_elsewhere(measured: Measured, basis: Measured | None) -> bool:
    """Whether batches take a quite different time than when the lessons were learnt."""
    if basis is None:
        return False
    pairs = [(measured.trainer_s, basis.trainer_s)]
    if measured.workers == basis.workers:
        pairs.append((measured.worker_s, basis.worker_s))
    ratios = [max(now, _SECONDS_MIN) / max(then, _SECONDS_MIN) for now, then in pairs]
    return any(not 1 / _OTHER_CONDITIONS <= ratio <= _OTHER_CONDITIONS for ratio in ratios)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _duration(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
