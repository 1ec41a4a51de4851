# SPDX-License-Identifier: Apache-2.0
"""Tiny items: a TensorDataset of 262,144 rows of 64 floats, 256 a batch, shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from workloads.workload import Workload


def build(folder: Path) -> dict[str, Any]:
    rows = torch.randn(262_144, 64, generator=torch.Generator().manual_seed(0))
    return {"dataset": TensorDataset(rows), "batch_size": 256, "shuffle": True}


def work(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    (rows,) = arguments["dataset"].tensors
    batch = torch.empty(arguments["batch_size"], rows.shape[1])
    while True:
        for indices in torch.split(torch.randperm(len(rows)), len(batch)):
            torch.index_select(rows, 0, indices, out=batch)
            yield


WORKLOAD = Workload(
    "tiny",
    build,
    work,
    work_is="randperm and index_select into one batch that stays, 1 process",
    work_process_count=1,
    floor=20.0,
    floor_of_sampler=0.6,
)
