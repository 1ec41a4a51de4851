# SPDX-License-Identifier: Apache-2.0
"""Has the costs of a batch measured while a loader runs (csrc/graph/load_meter.h): the clock of the
trainer's device and the processes of the workers are read here."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import _C
from penstock.tuning.trainer_clock import TrainerClock
from penstock.tuning.usable_cpus import shared_cpus

# Batches, those with boundary tensors, fetch_s, prefix_s, bytes, and of a pool its workers and the
# bytes a second that come from them.
Counters = tuple[int, int, float, float, int, int, float]

_ENOUGH_CPUS = 1 << 20  # for any number of workers
# One step in so many is timed on a device: the two events cost the host some 0.05 ms.
_DEVICE_TIMED_EVERY = 4


class LoadMeter:
    """Notes the steps of a loader's newest iterator. Confined to the training thread."""

    def __init__(self) -> None:
        self.native = _C.LoadMeter()
        self.clock = TrainerClock(None)
        self.sends_whole = True  # leaves that the trainer does not read come all the same
        self.are_elsewhere = False  # the workers, or some of them
        self._pids: Sequence[int] = ()
        self._step_count = 0

    def begin(self, workers: int, pids: Sequence[int], in_flight_max: int) -> None:
        """An epoch begins with a number of ``workers``, whose processes are ``pids``."""
        self._pids = pids
        self.native.begin(workers, in_flight_max)

    def note(self, called_at: float, returned_at: float, counters: Counters) -> None:
        """A batch was delivered, for a call of ``next()`` that lasted from then until then."""
        self.native.note(called_at, returned_at, counters, self.sends_whole)
        if self.clock.is_of_device:
            self._step_count += 1
            if self._step_count % _DEVICE_TIMED_EVERY == 0:
                for _, seconds in self.clock.take():
                    self.native.note_device(seconds)
                self.clock.begin("step")

    def note_call(self) -> None:
        """``next()`` is called: the trainer's work on a batch has ended."""
        if self.clock.is_of_device:
            self.clock.end()

    def note_waiting(self, seconds: float) -> None:
        """The program waited for batches to look at them ahead."""
        self.native.note_waiting(seconds)

    def shared_cpus(self) -> int:
        """How many CPUs the trainer and its workers may use together."""
        return _ENOUGH_CPUS if self.are_elsewhere else shared_cpus(self._pids)
