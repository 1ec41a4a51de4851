# SPDX-License-Identifier: Apache-2.0
"""Measures where the time of an epoch goes: the trainer's, its waiting, and the workers'."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.tuning.worker_choice import Measured

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SECONDS_KEPT_MAX = 10_000  # of single batches; a window may have millions
_PAUSE_MIN = 10  # times the median: longer is a pause, such as a validation, and no batch's time


class StallMeter:
    """Adds up stretches of epochs for one number of workers, until they are taken together.

    A stretch begins after a batch was delivered and ends after another one. Confined to the
    trainer's thread.
    """

    _workers: int

    def __init__(self) -> None:
        self._forget()
        self._owner: Any = None  # of the stretch that is open

    def begin(
        self, owner: Any, workers: int, counters: dict[str, Any], pids: Sequence[int]
    ) -> None:
        """Opens a stretch; a batch was just delivered. One that another owner left open ends here
        without having counted its waits, so all is forgotten."""
        if self._owner is not None or workers != self._workers:
            self._forget()
        self._owner = owner
        self._workers = workers
        self._pids = pids
        self._counters = counters
        self._cpu_s_before = _cpu_s(pids)
        self._trainer_cpu_s_before = time.process_time()
        self._began_at = self._returned_at = time.monotonic()

    def is_open(self, owner: Any) -> bool:
        return self._owner is owner

    def note(self, called_at: float, returned_at: float) -> None:
        """A batch was delivered, for a call of ``next()`` that lasted from then until then."""
        if len(self._trainer_seconds) < _SECONDS_KEPT_MAX:
            self._trainer_seconds.append(called_at - self._returned_at)
        self._noted_batches += 1
        self._call_s += returned_at - called_at
        self._returned_at = returned_at

    def end(self, counters: dict[str, Any]) -> None:
        self._owner = None
        before = self._counters
        batches: int = counters["batches"] - before["batches"]
        self._elapsed_s += self._returned_at - self._began_at
        self._trainer_cpu_s += time.process_time() - self._trainer_cpu_s_before
        self._batches += batches
        self._wait_s += counters["wait_s"] - before["wait_s"]
        self._fetch_s += counters["fetch_s"] - before["fetch_s"]
        cpu_s = _cpu_s(self._pids)
        if cpu_s is not None and self._cpu_s_before is not None:
            self._cpu_s += cpu_s - self._cpu_s_before
            # Delivered batches were made before they were ready.
            self._made_batches += batches + counters["ready"] - before["ready"]

    def has_seen(self, seconds: float, batches: int) -> bool:
        elapsed_s, count = self._elapsed_s, self._batches
        if self._owner is not None:
            elapsed_s += self._returned_at - self._began_at
            count = self._noted_batches
        return elapsed_s >= seconds and count >= batches

    def take(self) -> Measured:
        """The means over what was seen, which is forgotten. At least one batch was."""
        pause = _PAUSE_MIN * statistics.median(self._trainer_seconds)
        at_work = statistics.fmean(min(one, pause) for one in self._trainer_seconds)
        worker_s = self._fetch_s / self._batches
        is_known = self._made_batches > 0 and worker_s > 0
        measured = Measured(
            workers=self._workers,
            wait_s=self._wait_s / self._batches,
            # next() itself takes time too, which no worker can take from the trainer.
            trainer_s=at_work + max(0.0, self._call_s - self._wait_s) / self._batches,
            worker_s=worker_s,
            cpu_share=self._cpu_s / self._made_batches / worker_s if is_known else None,
            trainer_cpus=self._trainer_cpu_s / max(self._elapsed_s, 1e-9),
        )
        self._forget()
        return measured

    def _forget(self) -> None:
        self._workers = 0
        self._elapsed_s = self._wait_s = self._fetch_s = self._call_s = 0.0
        self._cpu_s = self._trainer_cpu_s = 0.0
        self._batches = self._noted_batches = self._made_batches = 0
        self._trainer_seconds: list[float] = []


def _cpu_s(pids: Sequence[int]) -> float | None:
    """Seconds that these processes were on a CPU or waited for one; None if the system does not
    say. A dead process counts until somebody has waited for it.
    """
    try:
        return sum(map(_cpu_s_of, pids))
    except OSError:
        return None


def _cpu_s_of(pid: int) -> float:
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime
    for thread in (folder / "task").iterdir():
        try:
            seconds += int((thread / "schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):
            continue  # it ended, or the kernel was built without
    return seconds
