# SPDX-License-Identifier: Apache-2.0
"""A workload: data, the loader's arguments, and the same work done with no loader."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of data and of reading it, as a user who knows torch would write it.

    `build` makes the arguments of a DataLoader, which torch's class and ours get alike. `work` does
    in process `index` of `count` the same work as the workers for their batches, without end, and
    yields after each batch: no loader, no hand-over. `floor` is the ratio to torch that must be
    reached. `penstock_options` are options of penstock that a user adds to the arguments.
    `adapt_for_penstock` replaces arguments as a user of penstock would.
    """

    name: str
    build: Callable[[Path], dict[str, Any]]
    work: Callable[[dict[str, Any], int, int], Iterator[None]]
    work_is: str
    prepare: Callable[[Path, bool], None] | None = None
    work_process_count: int = 2
    floor: float = 0.97
    # What bounds the floor: our rate over the bare sampler's is enough from this on. 0: unbounded.
    floor_of_sampler: float = 0.0
    # The CPU time per GB, over torch's, that must not be passed.
    ceiling_of_cpu: float = float("inf")
    penstock_options: dict[str, Any] = field(default_factory=dict)
    adapt_for_penstock: Callable[[dict[str, Any]], None] | None = None
    # The fewest batches before the timing and in it, for batches that take seconds.
    warmup_batches: int = 16
    timed_batches: int = 1

    def folder(self, out: Path, quick: bool) -> Path:
        """The folder with this workload's data, which is written when it is not there yet."""
        folder = out / (self.name + ("-quick" if quick else ""))
        if self.prepare is not None and not folder.is_dir():
            # Renamed when complete, so that no incomplete folder has the name.
            partial = out / f"{folder.name}.partial-{os.getpid()}"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self.prepare(partial, quick)
            partial.rename(folder)
        return folder


def index_batches(arguments: dict[str, Any], index: int, count: int) -> Iterator[list[int]]:
    """The indices of every `count`-th batch from `index` on, epoch after epoch."""
    sample_count, batch_size = len(arguments["dataset"]), arguments["batch_size"]
    generator = torch.Generator().manual_seed(index)
    while True:
        if arguments.get("shuffle"):
            order = torch.randperm(sample_count, generator=generator).tolist()
        else:
            order = list(range(sample_count))
        for start in range(index * batch_size, sample_count - batch_size + 1, count * batch_size):
            yield order[start : start + batch_size]


def fetch_samples(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    """Reads the samples of each batch and drops them."""
    dataset = arguments["dataset"]
    for batch in index_batches(arguments, index, count):
        [dataset[sample] for sample in batch]
        yield


def fetch_and_collate(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    """Reads the samples of each batch and runs the user's collate_fn on them."""
    dataset, collate = arguments["dataset"], arguments["collate_fn"]
    for batch in index_batches(arguments, index, count):
        collate([dataset[sample] for sample in batch])
        yield
