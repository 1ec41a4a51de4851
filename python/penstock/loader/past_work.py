# SPDX-License-Identifier: Apache-2.0
"""What the workers and samples of a loader's iterators took, the iterators that ended included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.loader.step_times import SlowSample, WorkerTimes

_SLOW_SAMPLES_MAX = 8
_WORKERS_MAX = 4096  # a pool's workers come and go


class PastWork:
    """Confined to the trainer's thread."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerTimes] = {}
        self.slow_samples: list[SlowSample] = []

    def add(self, workers: Mapping[int, tuple[Any, ...]], samples: list[tuple[Any, ...]]) -> None:
        """As a stream has them."""
        for worker_id, times in workers.items():
            if worker_id in self.workers or len(self.workers) < _WORKERS_MAX:
                known = self.workers.get(worker_id, WorkerTimes())
                self.workers[worker_id] = known + WorkerTimes(*times)
        for seconds, index, _epoch, sequence, place, worker_id in samples:
            self.note_sample(SlowSample(seconds, index, sequence, place, worker_id))

    def is_slow(self, seconds: float) -> bool:
        """Whether a sample that took so long is one to note."""
        noted = self.slow_samples
        return len(noted) < _SLOW_SAMPLES_MAX or seconds > noted[-1].seconds

    def note_sample(self, sample: SlowSample) -> None:
        self.slow_samples.append(sample)
        self.slow_samples.sort(key=lambda one: -one.seconds)
        del self.slow_samples[_SLOW_SAMPLES_MAX:]

    def copy(self) -> PastWork:
        copied = PastWork()
        copied.workers = dict(self.workers)
        copied.slow_samples = list(self.slow_samples)
        return copied
