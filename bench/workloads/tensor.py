# SPDX-License-Identifier: Apache-2.0
"""A dataset that holds one tensor of 200 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workloads.array import COLUMNS, Rows, row_count
from workloads.workload import Workload, fetch_samples


def build(folder: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(row_count(folder), COLUMNS, generator=generator)
    return {"dataset": Rows(rows), "batch_size": 256, "shuffle": True}


WORKLOAD = Workload("tensor", build, fetch_samples, work_is="reading the rows, 2 processes")
