# SPDX-License-Identifier: Apache-2.0
"""PyTorch Geometric: loaders of another library that subclass torch's class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader
from program_runs import PENSTOCK_RUN, PYTHON, run_program
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import penstock

pytestmark = pytest.mark.slow


def make_graphs() -> list[Data]:
    rings = [torch.arange(size) for size in range(3, 12)]
    return [
        Data(x=ring.float()[:, None] / 7, edge_index=torch.stack([ring, ring.roll(1)]))
        for ring in rings
    ]


def read_graphs() -> tuple[Any, Any]:
    loader = torch_geometric.loader.DataLoader(
        make_graphs(), batch_size=4, shuffle=True, num_workers=1
    )
    batches = [
        (batch.x.tolist(), batch.edge_index.tolist(), batch.ptr.tolist())
        for _ in range(2)
        for batch in loader
    ]
    return batches, loader


def test_library_imported_before_install_uses_the_torch_iterator(
    same_as_torch: Callable[..., Any],
) -> None:
    """Its classes were made from torch's. They remain torch loaders for any check."""
    loader = same_as_torch(read_graphs)
    assert isinstance(loader, DataLoader)
    assert not isinstance(loader, penstock.DataLoader)


GRAPHS = """
    import torch
    from test_geometric import read_graphs
    torch.manual_seed(1)
    batches, loader = read_graphs()
    print(batches)
    print(loader.stats().iterator if hasattr(loader, "stats") else "torch")
"""


@pytest.mark.long
def test_library_imported_under_penstock_run_matches_torch(tmp_path: Path) -> None:
    runs = {}
    for name, command in (("torch", PYTHON), ("penstock", PENSTOCK_RUN)):
        runs[name], iterator = run_program(command, GRAPHS, tmp_path).splitlines()
        assert iterator == name
    assert len(runs["torch"]) > 1000
    assert runs["penstock"] == runs["torch"]
