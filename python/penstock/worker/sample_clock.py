# SPDX-License-Identifier: Apache-2.0
"""Times what a batch is made of: its samples, and the making of a batch of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.seams.iterators import MapDatasetFetcher
from penstock.stream.shard_state import draws_nothing

# Samples that take less are not timed one by one: that would cost them more than a hundredth.
_TIMED_SAMPLE_S = 50e-6


class FetchClock(Protocol):
    """Of the batch that is being made; `csrc/dataset/fetch_clock.h`."""

    def begin_collate(self) -> None: ...

    def note_sample(self, time_ns: int) -> None: ...


class TimedCollate:
    """A collate_fn that tells a clock when it begins."""

    def __init__(self, clock: FetchClock, collate_fn: Callable[[Any], Any]) -> None:
        self._begin = clock.begin_collate
        self._collate_fn = collate_fn
        self.draws_nothing = draws_nothing(collate_fn)

    def __call__(self, samples: Any) -> Any:
        self._begin()
        return self._collate_fn(samples)


class TimedMapFetcher(MapDatasetFetcher):
    """Torch's fetcher of map-style datasets without ``__getitems__`` of their own, that tells a
    clock what each sample took, unless those of the batch before were too quick for that. Confined
    to one thread."""

    def __init__(
        self,
        clock: FetchClock,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, auto_collation, collate_fn, drop_last)
        self._timed = MapDatasetFetcher(
            _TimedSamples(dataset, clock), auto_collation, collate_fn, drop_last
        )
        self._is_slow = True

    def fetch(self, possibly_batched_index: Any) -> Any:
        began_at = time.perf_counter()
        fetch: Callable[[Any], Any] = self._timed.fetch if self._is_slow else super().fetch
        batch = fetch(possibly_batched_index)
        count = len(possibly_batched_index) if self.auto_collation else 1
        self._is_slow = time.perf_counter() - began_at > count * _TIMED_SAMPLE_S
        return batch


class _TimedSamples:
    def __init__(self, dataset: Any, clock: FetchClock) -> None:
        self._dataset = dataset
        self._note = clock.note_sample

    def __getitem__(self, index: Any) -> Any:
        began_at = time.perf_counter_ns()
        sample = self._dataset[index]
        self._note(time.perf_counter_ns() - began_at)
        return sample
