# SPDX-License-Identifier: Apache-2.0
"""The sample caches in a loader's dataset: their counts, and the samples that they store."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from penstock import _C
from penstock.worker.reachable import reachable


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Reads and contents of a cache of samples, counted over all processes that share it.

    Attributes:
        hits (int): Samples read from memory.
        disk_hits (int): Samples read from disk.
        misses (int): Samples that had to be made.
        hit_bytes (int): Bytes of the samples read from memory.
        disk_hit_bytes (int): Bytes of the samples read from disk.
        entries (int): Samples in memory.
        bytes (int): Their bytes, as they count against the budget, without rounding up to 64 bytes
            each.
        budget_bytes (int): Budget of the memory; 0 without.
        disk_entries (int): Samples that these processes wrote to the disk.
        disk_bytes (int): Their bytes.
        random (int): Samples that draw random numbers, which are not stored; all samples if two
            makings of one differed.
        compared (int): Samples that were made twice and compared.
        damaged (int): Stored samples that were dropped, because bits or the source file changed.
        uncertain (int): Times that a sample was not stored because another thread drew random
            numbers while it was made.
    """

    hits: int
    disk_hits: int
    misses: int
    hit_bytes: int
    disk_hit_bytes: int
    entries: int
    bytes: int
    budget_bytes: int
    disk_entries: int
    disk_bytes: int
    random: int
    compared: int
    damaged: int
    uncertain: int

    def __str__(self) -> str:
        text = (
            f"of {self.hits + self.disk_hits + self.misses:,} samples, {self.hits:,} were read "
            f"from a cache in memory, {self.disk_hits:,} from disk, and {self.misses:,} were made"
        )
        return f"{text}; {self.damaged:,} had been damaged" if self.damaged else text


class HasSampleCache:
    """A dataset with a cache, as long as its samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def stats(self) -> CacheStats: ...

    @abstractmethod
    def keep_only(self, indices: range) -> None: ...


def cache_stats_of(dataset: Any) -> CacheStats | None:
    """Return the counts of the caches in a dataset, added up; None if it has none."""
    found = [cache.stats() for cache in reachable(dataset, HasSampleCache)]
    if not found:
        return None
    names = [field.name for field in dataclasses.fields(CacheStats)]
    return CacheStats(**{name: sum(getattr(one, name) for one in found) for name in names})


def keep_owned(dataset: Any, rank: int, rank_count: int) -> None:
    """Have the caches in a dataset store only the samples that the rank owns (``owner_of()``).

    A cache below a part of the dataset, which counts other samples, stores any.
    """
    count = len(dataset)

    def owner_of(index: int) -> int:
        return _C.owners_of([index], count, rank_count)[0]

    first, end = (bisect_left(range(count), one, key=owner_of) for one in (rank, rank + 1))
    owned = range(first, end)
    for cache in reachable(dataset, HasSampleCache):
        if len(cache) == count and len(owned) > 0:
            cache.keep_only(owned)
