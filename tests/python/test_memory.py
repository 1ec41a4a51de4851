# SPDX-License-Identifier: Apache-2.0
"""The cost of batches over time: descriptors, page faults, shared memory and its cap."""

from __future__ import annotations

import collections
import gc
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from sample_datasets import Computed
from torch.utils.data import Dataset, TensorDataset

from penstock import DataLoader

MIB = 1 << 20


def row(size: int, index: int) -> torch.Tensor:
    return torch.full((size,), float(index))


def arena_bytes_in_use() -> int:
    """Memory of the arenas that this process maps, as counted by the kernel."""
    total = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:penstock" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_descriptors_do_not_grow_with_kept_batches() -> None:
    loader = DataLoader(Computed(600, partial(row, 2000)), batch_size=2, num_workers=2)
    iterator = iter(loader)
    kept = [next(iterator)]
    before = len(process_traces.descriptors())
    kept.extend(iterator)
    assert len(kept) == 300
    assert len(process_traces.descriptors()) <= before + 2


def test_keeping_batches_copies_beyond_the_arena_without_waiting() -> None:
    loader = DataLoader(
        Computed(100, partial(row, 20_000)), batch_size=2, num_workers=1, timeout=30
    )
    kept = list(loader)
    assert [int(batch[1, 7]) for batch in kept] == list(range(1, 100, 2))
    assert loader.stats().copied_batches > 0


def test_dropping_batches_causes_no_copies() -> None:
    loader = DataLoader(
        TensorDataset(torch.zeros(4000, 250)), batch_size=10, num_workers=2, shuffle=True
    )
    for batch in loader:
        del batch
    stats = loader.stats()
    assert (stats.batches, stats.copied_batches, stats.inline_batches) == (400, 0, 0)


@pytest.mark.slow
def test_steady_state_takes_under_one_page_fault_per_mebibyte() -> None:
    """Of the trainer and of its workers, for batches of 4 MiB from a dataset with large samples."""
    samples = [row(MIB // 4, index) for index in range(8)]
    loader = DataLoader(
        Computed(480, lambda index: samples[index % 8]), batch_size=4, num_workers=2
    )
    iterator = iter(loader)
    pids: list[int | str] = [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
    held: collections.deque[Any] = collections.deque(maxlen=4)
    for _ in range(40):  # warm-up: with four held, every slab has been used
        held.append(next(iterator))
    held.clear()
    faults = sum(process_traces.page_faults(pid) for pid in ["self", *pids])
    checked = 0.0
    for _ in range(60):
        checked += float(next(iterator)[0, 0])
    faults = sum(process_traces.page_faults(pid) for pid in ["self", *pids]) - faults
    assert faults / (60 * 4) < 1, f"{faults} faults for 240 MiB"


@pytest.mark.long
def test_shared_memory_stays_below_the_cap_for_mixed_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_ARENA_BYTES", str(4 * MIB))
    sizes = [10, 60_000, 3, 250_000, 400_000, 1]
    loader = DataLoader(
        Computed(120, lambda index: row(sizes[index % 6], index)), batch_size=None, num_workers=2
    )
    most = 0
    before = arena_bytes_in_use()
    for place, batch in enumerate(loader):
        assert int(batch[0]) == place
        del batch
        most = max(most, arena_bytes_in_use() - before)
    assert most <= 2 * 4 * MIB + 64 * 1024


def test_memory_beyond_the_cap_is_released_with_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_ARENA_BYTES", str(MIB))
    loader = DataLoader(
        Computed(12, partial(row, MIB)), batch_size=None, num_workers=1, prefetch_factor=1
    )
    iterator = iter(loader)
    for place in range(12):
        batch = next(iterator)
        assert int(batch[-1]) == place
        del batch
        gc.collect()
        # One batch of 4 MiB may be waiting; earlier ones are released.
        assert arena_bytes_in_use() <= 2 * 4 * MIB + 2 * MIB


def test_memory_does_not_grow_over_epochs() -> None:
    """How many slabs an epoch touches depends on timing; there are never more of them."""
    batch_bytes = 20 * 500 * 4
    loader = DataLoader(
        TensorDataset(torch.zeros(2000, 500)), batch_size=20, num_workers=2, persistent_workers=True
    )
    iterator = iter(loader)
    slabs = 2 * (iterator._prefetch_depth + 2)  # type: ignore[attr-defined]
    for _ in range(12):
        for batch in loader:
            del batch
    assert len(process_traces.arena_mappings()) == 2
    # A slab also holds the table of its tensors, and an arena a header page.
    assert arena_bytes_in_use() <= slabs * (batch_bytes + 8 * 1024) + 2 * 64 * 1024


def test_restarted_epochs_release_their_prefetched_batches() -> None:
    loader = DataLoader(
        Computed(200, partial(row, 30_000)),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
    )
    for _ in range(30):
        batch = next(iter(loader))
        assert int(batch[0, 0]) == 0
        del batch
    stats = loader.stats()
    assert stats.copied_batches == 0
    assert stats.arenas <= 4


def test_only_kept_batches_keep_memory_of_a_deleted_loader() -> None:
    loader = DataLoader(Computed(20, partial(row, 100_000)), batch_size=2, num_workers=1)
    iterator = iter(loader)
    kept: Any = next(iterator)
    del iterator, loader
    gc.collect()
    assert len(process_traces.arena_mappings()) == 1
    assert float(kept[1].sum()) == 100_000
    kept = None
    assert process_traces.arena_mappings() == []


@pytest.mark.long
def test_forks_while_holding_batches_do_not_exhaust_the_arena() -> None:
    """Slabs that a child may see are never written again: new ones replace them."""
    loader = DataLoader(Computed(160, partial(row, 5000)), batch_size=2, num_workers=1, timeout=30)
    for place, batch in enumerate(loader):
        if place % 4 == 0:
            child = os.fork()
            if child == 0:
                os._exit(0 if int(batch[0, 0]) == 2 * place else 1)
            _, status = os.waitpid(child, 0)
            assert status == 0
        assert int(batch[1, 9]) == 2 * place + 1


class Collects(Dataset[int]):
    """Holds many unused containers, and may collect garbage."""

    def __init__(self, collects: bool) -> None:
        self.collects = collects
        self.containers = [[index] for index in range(400_000)]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return gc.collect() if self.collects else 0


def private_bytes_of_a_worker(collects: bool) -> int:
    loader = DataLoader(
        Collects(collects),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    assert len(list(iterator)) == 3
    rollup = Path(f"/proc/{iterator._workers[0].pid}/smaps_rollup").read_text()  # type: ignore[attr-defined]
    (line,) = (line for line in rollup.splitlines() if line.startswith("Private_Dirty:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_garbage_collection_in_a_worker_copies_no_trainer_pages() -> None:
    """The collector writes to each container that it visits: 400,000 of them take 30 MB."""
    before, after = (private_bytes_of_a_worker(collects) for collects in (False, True))
    assert after - before < 10 * MIB, f"{before} bytes without collecting, {after} with"
