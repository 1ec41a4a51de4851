# SPDX-License-Identifier: Apache-2.0
"""Streams, their expected batches, and how the delivered ones differ.

The oracle is the same loader in one process: ``num_workers=0, seeding="batch"``. Every batch holds
random numbers, so that no two have one digest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import pool_datasets
import torch
from paced_datasets import PacedSamples, PacedShards, PacedStatefulShards
from pool_datasets import digests

from penstock import DataLoader

Kind = Literal["map", "shards", "stateful shards"]
KINDS: tuple[Kind, ...] = ("map", "shards", "stateful shards")

CODE_PATHS = [str(Path(__file__).with_name("paced_datasets.py")), pool_datasets.__file__]
# How long after a fault a pause of the stream is attributed to it.
BLAME_S = 8.0


@dataclass(frozen=True, slots=True)
class Stream:
    """A few epochs of a dataset. ``pause_s`` is the time of a sample, and is no part of it."""

    kind: Kind
    seed: int
    sample_count: int = 1200  # of an epoch
    epoch_count: int = 3
    batch_size: int = 8
    shard_count: int = 4
    values: int = 64
    pause_s: float = 0.004

    @property
    def batch_s(self) -> float:
        """The time of a worker for a batch."""
        return self.batch_size * self.pause_s

    def handover_s(self, place: int) -> float:
        """The input that a worker needs for the batch at ``place`` of a shard that it takes over:
        with a shard without a state it reads the earlier batches again."""
        if self.kind != "shards":
            return self.batch_s
        shard_samples = -(-self.sample_count // self.shard_count)
        epoch_batches = self.shard_count * -(-shard_samples // self.batch_size)
        return (1 + place % epoch_batches // self.shard_count) * self.batch_s

    def loader(self, **options: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        options = {
            "batch_size": self.batch_size,
            "seeding": "batch",
            "generator": generator,
            **options,
        }
        if self.kind == "map":
            samples = PacedSamples(self.sample_count, self.values, self.pause_s)
            return DataLoader(samples, shuffle=True, **options)
        make = PacedShards if self.kind == "shards" else PacedStatefulShards
        return DataLoader(make(self.sample_count, self.pause_s), shards=self.shard_count, **options)

    def expected(self) -> list[str]:
        """The digests of every batch of every epoch, made in this process alone."""
        return _expected(replace(self, pause_s=0.0))


@functools.lru_cache(maxsize=8)
def _expected(stream: Stream) -> list[str]:
    loader = stream.loader()
    found = [digest for _ in range(stream.epoch_count) for digest in digests(loader)]
    assert len(set(found)) == len(found), "two batches of the oracle are the same"
    return found


@dataclass(frozen=True, slots=True)
class Differences:
    """How many of the delivered batches are not as expected."""

    missing: int = 0
    doubled: int = 0
    reordered: int = 0
    different: int = 0

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    def __bool__(self) -> bool:
        return self != Differences()


def compare(expected: Sequence[str], found: Sequence[str]) -> Differences:
    """A batch that is delivered with other bytes is different, and the one that it replaced is
    missing."""
    places = {digest: place for place, digest in enumerate(expected)}
    seen: set[int] = set()
    furthest = -1
    doubled = reordered = different = 0
    for digest in found:
        place = places.get(digest)
        if place is None:
            different += 1
        elif place in seen:
            doubled += 1
        else:
            seen.add(place)
            reordered += place < furthest
            furthest = max(furthest, place)
    return Differences(len(expected) - len(seen), doubled, reordered, different)


@dataclass(frozen=True, slots=True)
class Delivery:
    place: int  # in the whole stream, from 0
    at: float  # of the monotonic clock, which the processes of a machine share
    digest: str


def stalls(
    deliveries: Sequence[Delivery], faults: Sequence[float], handover_s: Callable[[int], float]
) -> list[float]:
    """For each fault the longest pause between two deliveries that it may have caused, beyond the
    time that another worker needs for the batch at the place of the later one."""
    found = []
    for number, fault in enumerate(faults):
        end = min([fault + BLAME_S, *faults[number + 1 : number + 2]])
        pauses = [
            later.at - earlier.at - handover_s(later.place)
            for earlier, later in zip(deliveries, deliveries[1:], strict=False)
            if later.at > fault and earlier.at < end
        ]
        found.append(max(0.0, max(pauses, default=0.0)))
    return found


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank, so with fewer than a hundred values the 99th is the largest."""
    if not values:
        return 0.0
    if len(values) == 1:
        return values[0]
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, -(-percent * len(ranked) // 100) - 1)]
