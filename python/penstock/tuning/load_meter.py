# SPDX-License-Identifier: Apache-2.0
"""Measurement of a batch's costs while a loader runs (csrc/graph/load_meter.h). This module reads
the clock of the trainer's device, the processes of the workers, and the seconds of the training
thread's work."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from penstock import _C
from penstock.tuning.process_resources import shared_cpus

# Batches, batches with boundary tensors, fetch_s, prefix_s, bytes, and of a pool its workers and
# the bytes a second received from them.
Counters = tuple[int, int, float, float, int, int, float]

_ENOUGH_CPUS = 1 << 20  # for any number of workers
# One of this many steps is timed on a device: the two events cost the host some 0.05 ms.
_DEVICE_TIMED_EVERY = 4
_PENDING_MAX = 256  # stretches that a device has not finished; others are not measured

logger = logging.getLogger(__name__)


class LoadMeter:
    """Notes the steps of a loader's newest iterator. Confined to the training thread."""

    def __init__(self) -> None:
        self.native = _C.LoadMeter()
        self.clock = TrainerClock(None)
        self.sends_whole = True  # also leaves that the trainer does not read are sent
        self.are_remote = False  # the workers, or some of them
        self._pids: Sequence[int] = ()
        self._step_count = 0

    def begin(self, workers: int, pids: Sequence[int], in_flight_max: int) -> None:
        """Start an epoch with a number of ``workers``, whose processes are ``pids``."""
        self._pids = pids
        self.native.begin(workers, in_flight_max)

    def note(self, called_at: float, returned_at: float, counters: Counters) -> None:
        """Note the delivery of a batch by a call of ``next()`` between these times."""
        self.native.note(called_at, returned_at, counters, self.sends_whole)
        if self.clock.is_of_device:
            self._step_count += 1
            if self._step_count % _DEVICE_TIMED_EVERY == 0:
                for _, seconds in self.clock.take():
                    self.native.note_device(seconds)
                self.clock.begin("step")

    def note_call(self) -> None:
        """Note a call of ``next()``: the trainer's work on a batch has ended."""
        if self.clock.is_of_device:
            self.clock.end()

    def note_waiting(self, seconds: float) -> None:
        """Note that the program waited for batches to look at them ahead."""
        self.native.note_waiting(seconds)

    def shared_cpus(self) -> int:
        """Return the number of CPUs that the trainer and its workers may use together."""
        return _ENOUGH_CPUS if self.are_remote else shared_cpus(self._pids)


class TrainerClock:
    """Times stretches between ``begin`` and ``end``. Confined to the training thread.

    With a GPU, or another accelerator, these are events on the stream that is current there: the
    time between them is the device's time for the work submitted to it in between. The host does
    not wait for the device, so a stretch is known some time after it ended. Elsewhere, and on a
    device whose events have no times, it is the host's clock.
    """

    def __init__(
        self, device: torch.device | None, make_event: Callable[[], Any] | None = None
    ) -> None:
        self._device = device
        if make_event is None and device is not None and device.type != "cpu":
            make_event = self._device_event
        self._make_event = make_event
        self._open: tuple[Any, Any] | None = None
        self._pending: deque[tuple[Any, Any, Any]] = deque()
        self._done: list[tuple[Any, float]] = []

    @property
    def is_of_device(self) -> bool:
        """Return whether it is another clock than the host's."""
        return self._make_event is not None

    def begin(self, label: Hashable) -> None:
        """Start a stretch; one that is still open is discarded."""
        self._open = (label, self._now()) if len(self._pending) < _PENDING_MAX else None

    def end(self) -> None:
        if self._open is None:
            return
        label, began = self._open
        self._open = None
        if self._make_event is None:
            self._done.append((label, time.perf_counter() - began))
        else:
            self._pending.append((label, began, self._now()))

    def take(self) -> list[tuple[Any, float]]:
        """Return the stretches that are known and were not taken before, in order."""
        while self._pending and self._pending[0][2].query():
            label, began, ended = self._pending.popleft()
            try:
                milliseconds = began.elapsed_time(ended)
            except RuntimeError:
                logger.debug("the events of %s have no timestamps", self._device, exc_info=True)
                self._make_event = None
                self._open = None
                self._pending.clear()
                break
            self._done.append((label, milliseconds * 1e-3))
        done, self._done = self._done, []
        return done

    def _now(self) -> Any:
        if self._make_event is None:
            return time.perf_counter()
        event = self._make_event()
        if self._device is None:
            event.record()
        else:
            event.record(torch.accelerator.current_stream(self._device))
        return event

    def _device_event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)
