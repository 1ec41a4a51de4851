# SPDX-License-Identifier: Apache-2.0
"""Chooses a loader's number of workers, again and again, from what its iterators measured."""

from __future__ import annotations

import dataclasses
import logging

from penstock.tuning.stall_meter import StallMeter
from penstock.tuning.usable_cpus import usable_cpus
from penstock.tuning.worker_choice import Lessons, WorkerChoice, WorkerLimits, choose_workers

_FIRST_WINDOW_S = 2.0
_WINDOW_MAX_S = 64.0
_BATCHES_MIN = 8  # and two of each worker

_log = logging.getLogger(__name__)


class WorkerTuner:
    """What a loader knows about how many workers it needs. Confined to the trainer's thread."""

    def __init__(self, window_s: float = _FIRST_WINDOW_S) -> None:
        self.meter = StallMeter()
        self.choice: WorkerChoice | None = None
        self._lessons = Lessons()
        self._first_window_s = self._window_s = window_s

    def is_due(self, workers: int) -> bool:
        """Whether enough was seen of so many workers to choose anew."""
        return self.meter.has_seen(self._window_s, max(_BATCHES_MIN, 2 * workers))

    def choose(self, shards: int | None) -> int:
        """The number of workers to go on with, from what the meter has seen."""
        limits = WorkerLimits.of(usable_cpus(), shards)
        measured = self.meter.take()
        self.choice, self._lessons = choose_workers(measured, limits, self._lessons)
        if self.choice.workers == measured.workers:
            self._window_s = min(_WINDOW_MAX_S, 2 * self._window_s)
            _log.debug("%s", self.choice)
        else:
            self._window_s = self._first_window_s
            _log.info("%s", self.choice)
        return self.choice.workers

    def give_up(self, workers: int, workers_before: int, error: OSError) -> None:
        """So many could not be started; the loader goes on with those that it had before."""
        self._lessons = dataclasses.replace(
            self._lessons, grown_from=None, no_more_than=workers_before
        )
        _log.warning(
            "%d workers could not be started (%s), so the loader goes on with %d; raise the limits "
            "of processes and memory to have more",
            workers,
            str(error),  # a record that is kept would keep its traceback, and with it the pool
            workers_before,
        )
