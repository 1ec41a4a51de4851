# SPDX-License-Identifier: Apache-2.0
"""The loader of a C++ program, `tests/cpp/api/loader_main.cpp`, and the same datasets in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from native_build import build_folder
from torch.utils.data import Dataset, IterableDataset, get_worker_info

SECONDS_MAX = 120


class Draws(Dataset[Any]):
    """Each sample is its index, a draw from its generator and one from the batch's."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> Any:
        return index, torch.rand(2, generator=generator), torch.rand(2)


class Pictures(Dataset[Any]):
    """Each sample is its index and a picture of 12 KiB."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, torch.arange(3 * 64 * 64).add(index).to(torch.uint8).reshape(3, 64, 64)


class Forgetful(Pictures):
    """Returns a different picture each time."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.made_count = 0

    def __getitem__(self, index: int) -> Any:
        self.made_count += 1
        index, picture = super().__getitem__(index)
        return index, picture + self.made_count


class DrawStream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.size, step):
            yield index, torch.rand(2)


PLUGIN = build_folder() / "tests" / "libdraws_plugin.so"


def start_cpp(**given: Any) -> subprocess.Popen[str]:
    """Start the C++ loader's program. ``environment`` extends this process's environment."""
    environment = {**os.environ, "PENSTOCK_PYTHON": sys.executable, **given.pop("environment", {})}
    return subprocess.Popen(
        [str(build_folder() / "tests" / "loader_main"), json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,  # a Python worker imports this folder's modules
        env=environment,
    )


def finish_cpp(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the process; return its exit code and its output."""
    try:
        out, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
    return process.returncode, out, err


def run_cpp(**given: Any) -> list[Any]:
    """Return the C++ loader's output: its batches as lists of numbers, and with ``stop`` its
    state."""
    code, out, err = finish_cpp(start_cpp(**given))
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def error_of_cpp(**given: Any) -> str:
    """Return the error output of a C++ loader that fails."""
    code, _, err = finish_cpp(start_cpp(**given))
    assert code == 1, err
    return err


def as_numbers(batch: Any) -> Any:
    """Convert a batch to the program's output format: each tensor as a flat list of doubles."""
    if isinstance(batch, torch.Tensor):
        return batch.double().flatten().tolist()
    return [as_numbers(part) for part in batch] if isinstance(batch, (list, tuple)) else batch
