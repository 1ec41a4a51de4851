# SPDX-License-Identifier: Apache-2.0
"""pyarrow in a worker takes its memory from malloc, unless the program has chosen otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from penstock import DataLoader

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


class PoolOfWorker(Dataset[str]):
    """The name of the pool that pyarrow allocates from in the process that makes the sample."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        import pyarrow

        return str(pyarrow.default_memory_pool().backend_name)


class ParquetRows(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        while True:
            with parquet.ParquetFile(self.path) as file:
                for rows in file.iter_batches(4096, use_threads=False):
                    yield {
                        name: torch.from_numpy(rows[name].to_numpy().copy())
                        for name in rows.schema.names
                    }


def pool_of_worker(method: str) -> str:
    (name,) = DataLoader(
        PoolOfWorker(), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    return str(name)


@pytest.mark.long("spawn")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_makes_arrow_allocate_by_malloc(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    here = pyarrow.default_memory_pool().backend_name
    assert pool_of_worker(method) == "system"
    assert pyarrow.default_memory_pool().backend_name == here
    assert "ARROW_DEFAULT_MEMORY_POOL" not in os.environ


def test_arrow_pool_chosen_by_the_program_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "mimalloc")
    assert pool_of_worker("fork") == pyarrow.default_memory_pool().backend_name


@pytest.mark.long
@pytest.mark.slow
def test_parquet_rows_take_under_one_page_fault_per_megabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the workers, which had 3.3 because Arrow's allocator returns its memory."""
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    draw = torch.Generator().manual_seed(0)
    columns = {f"i{k}": torch.rand(32 * 4096, generator=draw).numpy() for k in range(13)}
    for k in range(26):
        columns[f"c{k}"] = torch.randint(100_000, (32 * 4096,), generator=draw).numpy()
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=4 * 4096)
    # Not forked: a forked worker also pays for the pages that it shares with this process.
    loader = DataLoader(
        ParquetRows(path), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
    for _ in range(300):
        next(iterator)

    def faults_per_mb() -> float:
        faults = sum(process_traces.page_faults(pid) for pid in pids)
        batch_bytes = 0
        for _ in range(60):
            batch_bytes += sum(column.nbytes for column in next(iterator).values())
        return (sum(process_traces.page_faults(pid) for pid in pids) - faults) / (batch_bytes / 1e6)

    # The system reclaims pages from processes when memory is short, which causes faults at any
    # time.
    assert min(faults_per_mb() for _ in range(4)) < 1
