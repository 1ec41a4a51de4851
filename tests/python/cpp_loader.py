# SPDX-License-Identifier: Apache-2.0
"""The loader of a C++ program, `tests/cpp/api/loader_main.cpp`, and the same datasets in Python."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import torch
from native_build import build_folder
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Draws(Dataset[Any]):
    """Each sample is its index, a draw from its own generator and one from the batch's."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> Any:
        return index, torch.rand(2, generator=generator), torch.rand(2)


class DrawStream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.size, step):
            yield index, torch.rand(2)


def run_cpp(**given: Any) -> list[Any]:
    """What the C++ loader says: its batches as lists of numbers, and with ``stop`` its state."""
    program = build_folder() / "tests" / "loader_main"
    done = subprocess.run(
        [str(program), json.dumps(given)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def as_numbers(batch: Any) -> Any:
    """A batch as the program writes it: each tensor as a flat list of doubles."""
    if isinstance(batch, torch.Tensor):
        return batch.double().flatten().tolist()
    return [as_numbers(part) for part in batch] if isinstance(batch, (list, tuple)) else batch
