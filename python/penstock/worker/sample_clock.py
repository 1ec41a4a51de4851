# SPDX-License-Identifier: Apache-2.0
"""Measure the parts of a batch's time: each sample, and collation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock import _C
from penstock.stream.shard_state import draws_nothing
from penstock.worker.failed_sample import NamingMapFetcher

# Faster samples are not timed one by one: that would add more than a hundredth to their time.
_TIMED_SAMPLE_S = 20e-6


def timed_collate(clock: _C.FetchClock, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``collate_fn`` with a call that reports its start to ``clock``."""
    return _C.TimedCollate(collate_fn, clock, draws_nothing(collate_fn))


class TimedMapFetcher(NamingMapFetcher):
    """Torch's fetcher of map-style datasets that do not define ``__getitems__`` themselves. It
    reports the time of each sample to a clock, unless the samples of the previous batch were too
    fast for that. Confined to one thread."""

    def __init__(
        self,
        clock: _C.FetchClock,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, auto_collation, collate_fn, drop_last)
        self._dataset = dataset
        self._timed = _C.TimedSamples(dataset, clock)
        self._is_slow = True

    def fetch(self, possibly_batched_index: Any) -> Any:
        began_at = time.perf_counter()
        self.dataset = self._timed if self._is_slow else self._dataset
        try:
            batch = super().fetch(possibly_batched_index)
        finally:
            self.dataset = self._dataset
        if type(possibly_batched_index) is list:  # any other value is iterated once
            spent_s = time.perf_counter() - began_at
            self._is_slow = spent_s > len(possibly_batched_index) * _TIMED_SAMPLE_S
        return batch
