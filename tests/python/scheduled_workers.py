# SPDX-License-Identifier: Apache-2.0
"""Loaders whose number of workers follows a test's schedule, and their streams."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from stream_oracle import describe
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock import DataLoader
from penstock.tuning.worker_tuner import WorkerTuner


class Augmented(Dataset[Any]):
    """Samples that are random; one fails."""

    def __init__(self, count: int = 60, failing: int = -1) -> None:
        self.count = count
        self.failing = failing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.work()
        if index == self.failing:
            raise LookupError(f"sample {index} after {random.random()}")
        return index, torch.rand(2), random.random(), float(np.random.random())

    def work(self) -> None:
        pass


class Shard(IterableDataset[Any]):
    def __init__(self, count: int = 40, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.count - 3 * first, step):
            time.sleep(self.seconds)
            yield index, torch.rand(2)


class Scheduled(WorkerTuner):
    """Chooses from a list, every few batches, independent of measurements."""

    def __init__(self, counts: list[int], every: int = 3) -> None:
        super().__init__()
        self.counts = counts
        self.every = every

    def is_due(self, workers: int) -> bool:
        return self.meter.has_seen(0.0, self.every)

    def choose(self, shards: int | None) -> int:
        measured = self.meter.take()
        return self.counts.pop(0) if self.counts else measured.workers


def automatic(dataset: Any, counts: list[int], **options: Any) -> Any:
    """Return a loader whose number of workers follows ``counts``."""
    loader: Any = DataLoader(dataset, num_workers="auto", seeding="batch", **options)
    loader._run.tuner = Scheduled(list(counts))
    return loader


def stream(loader: Any, epoch_count: int = 2, counts: list[int] | None = None) -> list[Any]:
    """Return batches and errors, with the trainer drawing in between, and the final generator
    states."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    seen = []
    for _ in range(epoch_count):
        iterator = iter(loader)
        while True:
            try:
                seen.append(describe(next(iterator)))
            except StopIteration:
                break
            except LookupError as error:
                seen.append(str(error).splitlines()[-1].removeprefix("LookupError: "))
            seen.append(describe([torch.rand(1), random.random()]))
            if counts is not None:
                counts.append(len(iterator._workers))
    generators = [loader.generator] if loader.generator is not None else []
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    return [*seen, describe([*states, *(one.get_state() for one in generators)])]


def measured(dataset: Any, epoch_count: int = 3, **options: Any) -> Any:
    """Return a loader that has chosen by itself, quickly, for a trainer that does little."""
    loader: Any = DataLoader(dataset, num_workers="auto", seeding="batch", **options)
    assert loader.worker_choice is None
    loader._run.tuner = WorkerTuner(window_s=0.1)
    for _ in range(epoch_count):
        for _ in loader:
            time.sleep(0.001)
    return loader
