# SPDX-License-Identifier: Apache-2.0
"""The costs of a batch in the trainer and in a worker, measured while a loader runs.

A step is from one delivery to the next: the trainer is at work on the batch, then waits for the
other one. A worker says for each batch how long it took, and how much of that went into boundary
tensors. Means leave out the longest and the shortest tenth, so that neither a pause of the program
nor one of the machine counts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.tuning.trainer_clock import TrainerClock
from penstock.tuning.usable_cpus import shared_cpus

_STEPS_KEPT = 512
_TRIMMED = 0.1  # of the steps, at either end

Counters = tuple[int, int, float, float]  # batches, those with boundary tensors, fetch_s, prefix_s


class Step(NamedTuple):
    """One batch, from its delivery to that of the next."""

    work_s: float
    wait_s: float
    fetch_s: float
    prefix_s: float
    has_boundary: bool


@dataclass(frozen=True, slots=True)
class MeasuredLoads:
    """Means of some steps; seconds of a batch."""

    steps: int
    workers: int
    cpus: int  # that the trainer and the workers may use together
    trainer_s: float  # the trainer at work on it
    fetch_s: float  # a worker at work on it, boundary tensors included
    prefix_s: float  # of that, on boundary tensors
    step_s: float  # from delivery to delivery
    step_error_s: float  # standard error of that


class LoadMeter:
    """Notes the steps of a loader's newest iterator. Confined to the training thread."""

    def __init__(self) -> None:
        self.clock = TrainerClock(None)
        self._steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self._device_seconds: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._workers = 1
        self._pids: Sequence[int] = ()
        self._in_flight_max = 0  # batches that may have been asked for before a plan changed
        self._settling = 0  # steps that are still to be left out
        self._seen_s = 0.0
        self.begin(1, (), 0)

    def begin(self, workers: int, pids: Sequence[int], in_flight_max: int) -> None:
        """An epoch begins, with so many workers; what lies between epochs is no step."""
        if workers != self._workers:
            self.forget()
        self._workers, self._pids, self._in_flight_max = workers, pids, in_flight_max
        self._delivered_at: float | None = None
        self._counters: Counters | None = None
        self._batch: tuple[float, float, bool] | None = None
        self._ahead_s = 0.0
        self._is_odd = False

    def note(self, called_at: float, returned_at: float, counters: Counters) -> None:
        """A batch was delivered, for a call of ``next()`` that lasted from then until then."""
        if self._delivered_at is not None and self._batch is not None and not self._is_odd:
            work_s = called_at - self._delivered_at - self._ahead_s
            wait_s = returned_at - called_at + self._ahead_s
            if self._settling > 0:
                self._settling -= 1
            else:
                self._steps.append(Step(work_s, wait_s, *self._batch))
                self._seen_s += work_s + wait_s
        before, self._counters = self._counters, counters
        self._batch = None
        if before is not None and counters[0] == before[0] + 1:
            self._batch = (
                counters[2] - before[2],
                counters[3] - before[3],
                counters[1] > before[1],
            )
        self._delivered_at = returned_at
        self._ahead_s = 0.0
        self._is_odd = False
        if self.clock.is_of_device:
            self._device_seconds += [seconds for _, seconds in self.clock.take()]
            self.clock.begin("step")

    def note_call(self) -> None:
        """``next()`` is called: the trainer's work on a batch has ended."""
        if self.clock.is_of_device:
            self.clock.end()

    def note_waiting(self, seconds: float) -> None:
        """The program waited for batches to look at them ahead."""
        self._ahead_s += seconds

    def skip(self) -> None:
        """This step is not like the others: something was planned or compared in it."""
        self._is_odd = True

    def forget(self) -> None:
        """A plan has changed, or something that was done now and then is not done any more.
        Batches that are under way are not measured either."""
        self.clear()
        self._settling = self._in_flight_max

    def clear(self) -> None:
        """Begins to measure anew, with the very next step."""
        self._steps.clear()
        self._device_seconds.clear()
        self._seen_s = 0.0

    @property
    def step_count(self) -> int:
        return len(self._steps)

    def has_seen(self, steps: int, seconds: float) -> bool:
        """Whether so many steps are noted, of so many seconds together; or as many as are kept."""
        count = len(self._steps)
        return count >= steps and (self._seen_s >= seconds or count == _STEPS_KEPT)

    def measured(self, needs_boundary: bool) -> MeasuredLoads | None:
        """The means over the steps since :meth:`forget`, of those with boundary tensors alone
        where the plan has some; None where these are under half."""
        steps = [step for step in self._steps if step.has_boundary or not needs_boundary]
        if not steps or 2 * len(steps) < len(self._steps):
            return None
        whole = [step.work_s + step.wait_s for step in steps]
        step_s, error_s = middle_mean(whole)
        trainer_s = middle_mean([step.work_s for step in steps])[0]
        if self._device_seconds:
            # The host runs ahead of its device, or the other way round: the slower one counts.
            trainer_s = max(trainer_s, middle_mean(list(self._device_seconds))[0])
        return MeasuredLoads(
            steps=len(steps),
            workers=self._workers,
            cpus=shared_cpus(self._pids),
            trainer_s=trainer_s,
            fetch_s=middle_mean([step.fetch_s for step in steps])[0],
            prefix_s=middle_mean([step.prefix_s for step in steps])[0],
            step_s=step_s,
            step_error_s=error_s,
        )


def middle_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the values but for the lowest and the highest tenth, and its standard error."""
    ordered = sorted(values)
    left_out = int(len(ordered) * _TRIMMED)
    middle = ordered[left_out : len(ordered) - left_out]
    if len(middle) < 2:
        return middle[0], math.inf
    return statistics.fmean(middle), statistics.stdev(middle) / math.sqrt(len(middle))
