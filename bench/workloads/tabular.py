# SPDX-License-Identifier: Apache-2.0
"""Tabular: Parquet read 4,096 rows at a time by an IterableDataset that makes the features.

The columns are as in the usual click logs: 13 counts and 26 categories. Counts become one float
matrix (clip, log1p); ten of them are bucketized too; every category is hashed to its table; four
pairs are crossed. Ids stay a tensor each, because each has a separate embedding table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import IterableDataset, get_worker_info

from workloads.workload import Workload

COUNTS = [f"i{column}" for column in range(13)]
CATEGORIES = [f"c{column}" for column in range(26)]
CROSSES = [("c0", "c1"), ("c2", "c3"), ("c4", "c5"), ("c6", "c7")]
BUCKETIZED = COUNTS[:10]
BATCH_ROWS = 4096
TABLE_ROWS = 100_003
MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed integer

Features = dict[str, torch.Tensor]


def prepare(folder: Path, quick: bool) -> None:
    draw = numpy.random.default_rng(0)
    row_count = 16 * BATCH_ROWS * (1 if quick else 16)
    columns: dict[str, Any] = {"label": draw.integers(0, 2, row_count, dtype=numpy.int64)}
    for name in COUNTS:
        columns[name] = draw.lognormal(2, 2, row_count).astype(numpy.float32) - 1
    for name in CATEGORIES:
        columns[name] = draw.zipf(1.3, row_count).clip(max=2**40).astype(numpy.int64)
    pyarrow.parquet.write_table(
        pyarrow.table(columns), folder / "clicks.parquet", row_group_size=row_count // 16
    )


class Clicks(IterableDataset[Features]):
    """Batches of features; each worker reads its own row groups."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._edges = torch.expm1(torch.linspace(0, 10, 31))

    def __iter__(self) -> Iterator[Features]:
        info = get_worker_info()
        return self.read(info.id, info.num_workers) if info is not None else self.read(0, 1)

    def read(self, index: int, count: int) -> Iterator[Features]:
        with pyarrow.parquet.ParquetFile(self._path) as file:
            groups = list(range(index, file.num_row_groups, count))
            for rows in file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False):
                yield self._features({name: _tensor(rows[name]) for name in rows.schema.names})

    def _features(self, columns: Features) -> Features:
        counts = torch.stack([columns[name] for name in COUNTS], dim=1)
        features = {
            "label": columns["label"].to(torch.float32),
            "dense": torch.log1p(counts.clip(0, 1e6)),
        }
        for name in BUCKETIZED:
            features[f"{name}_bucket"] = torch.bucketize(columns[name], self._edges)
        for name in CATEGORIES:
            features[name] = _hash(columns[name])
        for left, right in CROSSES:
            features[f"{left}_{right}"] = _hash(columns[left] * MULTIPLIER + columns[right])
        return features


def _tensor(column: pyarrow.Array) -> torch.Tensor:
    # Arrow's memory is read-only, and no code here writes to it; the copy is 16 us a column.
    return torch.from_numpy(column.to_numpy().copy())


def _hash(ids: torch.Tensor) -> torch.Tensor:
    mixed = ids * MULTIPLIER
    return (mixed ^ (mixed >> 29)).remainder(TABLE_ROWS)


def build(folder: Path) -> dict[str, Any]:
    return {"dataset": Clicks(folder / "clicks.parquet"), "batch_size": None}


def work(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    while True:
        for _ in arguments["dataset"].read(index, count):
            yield


WORKLOAD = Workload(
    "tabular",
    build,
    work,
    work_is="read and features of each batch, 2 processes",
    prepare=prepare,
    floor=2.0,
)
