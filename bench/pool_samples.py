# SPDX-License-Identifier: Apache-2.0
"""Datasets of the pool benches. They are sent to its workers, together with this file."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.utils.data import Dataset

CODE = __file__


class FixedCost(Dataset[dict[str, Any]]):
    """Samples that take their time without a CPU, so that few cores can simulate many machines.
    Each contains the process that made it, and its start time.
    """

    def __init__(self, count: int, sample_s: float, values: int) -> None:
        self.count = count
        self.sample_s = sample_s
        self.values = torch.arange(values, dtype=torch.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        begun_ns = time.monotonic_ns()
        if self.sample_s:
            time.sleep(self.sample_s)
        return {"values": self.values, "index": index, "pid": os.getpid(), "begun_ns": begun_ns}


class FromFiles(FixedCost):
    """Samples that each open a file, as in most datasets."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(os.devnull, "rb"):
            return super().__getitem__(index)


class Rows(Dataset[torch.Tensor]):
    """Rows of random bytes that exist already, which the worker combines into a batch. No two rows
    of a batch are equal: a pool would send equal ones once, where its link seems slow.
    """

    def __init__(self, count: int, row_bytes: int, row_count: int) -> None:
        self.count = count
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(
            256, (row_count, row_bytes), dtype=torch.uint8, generator=generator
        ).unbind()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % len(self.rows)]


class Ready(Dataset[torch.Tensor]):
    """A tensor that is there already, for loaders with ``batch_size=None``: the time of a batch is
    its way to the trainer.
    """

    def __init__(self, count: int, batch_bytes: int) -> None:
        self.count = count
        self.batch_bytes = batch_bytes
        self._batch: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._batch is None:
            self._batch = torch.arange(self.batch_bytes // 4, dtype=torch.float32)
        return self._batch


class Worked(Dataset[torch.Tensor]):
    """Samples that take about 3 ms of CPU time each."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        made = torch.arange(4096, dtype=torch.float32) + index
        for _ in range(400):
            made = made.sin()
        return made
