# SPDX-License-Identifier: Apache-2.0
"""The datasets of the chaos suite: the pool tests' datasets, with slow samples.

A process whose environment names ``LEAK_VARIABLE`` leaks memory with every sample.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from pool_datasets import Augmented, ShardIterator, Shards, StatefulShards

LEAK_VARIABLE = "CHAOS_LEAK_BYTES"

_leaked: list[bytes] = []


def spend(pause_s: float) -> None:
    time.sleep(pause_s)
    if leak_bytes := int(os.environ.get(LEAK_VARIABLE, "0")):
        _leaked.append(os.urandom(4096) * (leak_bytes // 4096))


class PacedSamples(Augmented):
    def __init__(self, count: int, values: int, pause_s: float) -> None:
        super().__init__(count, values)
        self.pause_s = pause_s

    def __getitem__(self, index: int) -> dict[str, Any]:
        spend(self.pause_s)
        return super().__getitem__(index)


class PacedShards(Shards):
    """Has no state: a worker that takes over a shard reads it from the start."""

    def __init__(self, count: int, pause_s: float) -> None:
        super().__init__(count)
        self.pause_s = pause_s

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for sample in super().__iter__():
            spend(self.pause_s)
            yield sample


class PacedShardIterator(ShardIterator):
    def __init__(self, numbers: list[int], pause_s: float) -> None:
        super().__init__(numbers)
        self.pause_s = pause_s

    def __next__(self) -> torch.Tensor:
        spend(self.pause_s)
        return super().__next__()


class PacedStatefulShards(StatefulShards):
    def __init__(self, count: int, pause_s: float) -> None:
        super().__init__(count)
        self.pause_s = pause_s

    def __iter__(self) -> PacedShardIterator:
        return PacedShardIterator(super().__iter__()._numbers, self.pause_s)
