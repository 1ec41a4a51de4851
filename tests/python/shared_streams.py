# SPDX-License-Identifier: Apache-2.0
"""An iterable dataset whose shards are divided among the ranks of a job, for tests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Uneven(IterableDataset[torch.Tensor]):
    """Samples of ``lengths[shard]`` places. Random draws omit some of them, so that no shard has a
    known length. A sample is its shard, its place and draws."""

    def __init__(self, lengths: list[int], kept: float = 0.8) -> None:
        self.lengths = lengths
        self.kept = kept

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        shard = 0 if worker is None else worker.id
        assert (1 if worker is None else worker.num_workers) == len(self.lengths)
        for place in range(self.lengths[shard]):
            drawn = [torch.rand(()), np.random.random(), random.random()]
            if drawn[0] < self.kept:
                yield torch.tensor([shard, place, *drawn], dtype=torch.float64)


class Resumed(Uneven):
    """The same dataset with a state: it continues from its position."""

    place = 0
    was_loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        shard = 0 if worker is None else worker.id
        if not self.was_loaded:
            self.place = 0
        self.was_loaded = False
        while self.place < self.lengths[shard]:
            self.place += 1
            yield torch.tensor([shard, self.place - 1, torch.rand(())], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.was_loaded = state["place"], True


class Late(IterableDataset[torch.Tensor]):
    """Takes a while for each of its samples."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        for place in range(self.lengths[worker.id]):
            time.sleep(0.05)
            yield torch.tensor([worker.id, place])


class Stuck(Uneven):
    """The last shard returns its samples and then hangs."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from super().__iter__()
        worker = get_worker_info()
        if worker is not None and worker.id == len(self.lengths) - 1:
            threading.Event().wait()


def by_shard(ranks: list[list[Any]]) -> dict[int, list[Any]]:
    """Return the batches of each shard in their order, from the batches of each rank."""
    found: dict[int, list[Any]] = {}
    for batches in ranks:
        for batch in batches:
            found.setdefault(int(batch[0][0]), []).append(batch)
    return found
