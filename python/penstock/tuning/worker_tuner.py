# SPDX-License-Identifier: Apache-2.0
"""``num_workers="auto"``: the first number of workers of a loader, and the choices of others while
it runs (csrc/scheduling/worker_choice.h). This module reads the clocks, the counters and the CPU
times of the workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from penstock import _C
from penstock.tuning.process_resources import cpu_seconds, usable_cpus

AUTO = "auto"
FIRST_WINDOW_S = 2.0

_log = logging.getLogger(__name__)


class WorkerTuner:
    """Knowledge of how many workers a loader needs. Confined to the trainer's thread."""

    def __init__(self, window_s: float = FIRST_WINDOW_S) -> None:
        self._native = _C.WorkerTuner(window_s)
        self.meter = self._native.meter
        self.choice: _C.WorkerChoice | None = None
        self._owner: object | None = None  # of the open stretch
        self._pids: Sequence[int] = ()

    def begin_stretch(
        self, owner: object, workers: int, counters: dict[str, Any], pids: Sequence[int]
    ) -> None:
        """Note that a batch was just delivered; ``owner`` counts from here on."""
        self._owner, self._pids = owner, pids
        self.meter.begin(
            id(owner), workers, counters, cpu_seconds(pids), time.process_time(), time.monotonic()
        )

    def has_stretch(self, owner: object) -> bool:
        return self._owner is owner and self.meter.is_open(id(owner))

    def end_stretch(self, counters: dict[str, Any]) -> None:
        self.meter.end(counters, cpu_seconds(self._pids), time.process_time())
        self._owner = None

    def is_due(self, workers: int) -> bool:
        """Return whether enough batches were seen with ``workers`` workers to choose again."""
        return self._native.is_due(workers)

    def choose(self, shards: int | None) -> int:
        """Return the number of workers to continue with, by the meter."""
        self.choice = self._native.choose(_C.WorkerLimits(usable_cpus(), shards))
        is_change = self.choice.workers != self.choice.measured.workers
        _log.log(logging.INFO if is_change else logging.DEBUG, "%s", self.choice)
        return self.choice.workers

    def give_up(self, workers: int, workers_before: int, error: OSError) -> None:
        """Note that ``workers`` workers could not be started; the loader keeps its previous
        ones."""
        self._native.give_up(workers_before)
        _log.warning(
            "%d workers could not be started (%s), so the loader continues with %d; raise the "
            "process and memory limits to have more",
            workers,
            str(error),  # a record that is kept would keep its traceback, and with it the pool
            workers_before,
        )


class AutomaticCount(int):
    """Value of a loader's ``num_workers`` after ``num_workers="auto"``.

    It reads as a plain int. A framework that rebuilds a loader from another's attributes passes it
    on, so that the new one chooses by itself too; copies and pickles keep it.
    """

    __slots__ = ()


def first_count(num_workers: Any, seeding: Any, shards: Any) -> Any:
    """Return the number of workers that the constructor stores for its ``num_workers`` argument.

    A number chosen by another loader becomes a plain number if this one cannot choose: accelerate
    copies torch's options, without ``seeding``. Raises TypeError for any text except "auto".
    """
    is_asked_for = isinstance(num_workers, str) and num_workers == AUTO
    if isinstance(num_workers, str) and not is_asked_for:
        raise TypeError(
            f'num_workers must be an integer >= 0 or "auto", got {num_workers!r}; pass '
            'num_workers="auto" to let penstock choose'
        )
    if not is_asked_for and not isinstance(num_workers, AutomaticCount):
        return num_workers
    if not is_asked_for and seeding not in ("batch", "sample"):
        return int(num_workers)
    cpus = usable_cpus()
    if not is_asked_for:
        return AutomaticCount(min(num_workers, cpus))
    is_number = type(shards) is int and shards > 0  # else it is refused later
    return AutomaticCount(_C.WorkerLimits(cpus, shards if is_number else None).first_workers)
