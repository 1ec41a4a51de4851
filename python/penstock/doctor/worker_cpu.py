# SPDX-License-Identifier: Apache-2.0
"""How long a loader's workers are on a CPU for a batch, and wait for one."""

from __future__ import annotations

from typing import Any

from penstock.tuning.process_times import ProcessTimes, process_times

_READ_S = 0.1  # between two readings


class WorkerCpu:
    """Adds up stretches over which the workers were the same processes. Confined to the trainer's
    thread."""

    def __init__(self) -> None:
        self._sum = ProcessTimes()
        self._batches = 0
        self._pids: tuple[int, ...] = ()
        self._last: ProcessTimes | None = None
        self._last_made = 0
        self._read_at = 0.0

    def read(self, iterator: Any, now: float) -> None:
        """To be called after each batch of ``iterator``; reads the system's files now and then."""
        workers = getattr(iterator, "_workers", None)
        if not workers or now - self._read_at < _READ_S:
            return
        self._read_at = now
        pids = tuple(worker.pid for worker in workers)
        counters = iterator.counters()
        made = counters.get("batches", 0) + counters.get("ready", 0)
        is_same = pids == self._pids and self._last is not None
        if is_same and made <= self._last_made:
            return
        times = process_times(pids)
        if is_same and times is not None and self._last is not None:
            self._sum = self._sum + ProcessTimes(
                times.on_cpu_s - self._last.on_cpu_s, times.delay_s - self._last.delay_s
            )
            self._batches += made - self._last_made
        self._pids, self._last, self._last_made = pids, times, made

    def of_batch(self) -> tuple[float | None, float]:
        """Seconds on a CPU, None where that is unknown, and of waiting for one."""
        if self._batches == 0:
            return None, 0.0
        return self._sum.on_cpu_s / self._batches, self._sum.delay_s / self._batches
