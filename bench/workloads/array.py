# SPDX-License-Identifier: Apache-2.0
"""A dataset that holds one numpy array of 200 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from torch.utils.data import Dataset

from workloads.workload import Workload, fetch_samples

COLUMNS = 100


class Rows(Dataset[Any]):
    """One row a sample."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def row_count(folder: Path) -> int:
    return 5_000 if folder.name.endswith("-quick") else 500_000


def build(folder: Path) -> dict[str, Any]:
    draw = numpy.random.default_rng(0)
    rows = draw.random((row_count(folder), COLUMNS), dtype=numpy.float32)
    return {"dataset": Rows(rows), "batch_size": 256, "shuffle": True}


WORKLOAD = Workload("array", build, fetch_samples, work_is="reading the rows, 2 processes")
