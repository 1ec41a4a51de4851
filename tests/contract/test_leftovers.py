# SPDX-License-Identifier: Apache-2.0
"""Iterators dropped at any moment leave no process, descriptor, mapping or thread."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import process_traces
import pytest
import torch
from sample_datasets import Computed, Streamed, number
from stream_oracle import without_frames
from torch.utils.data import TensorDataset

PARTS = [0, 1, 3, 7]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", PARTS)
def test_deleted_partial_iterator_leaves_nothing(
    loader_class: type, taken: int, persistent: bool
) -> None:
    before = process_traces.take()
    loader = loader_class(
        Computed(20, number), batch_size=2, num_workers=2, persistent_workers=persistent
    )
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    del iterator, loader
    assert process_traces.left_since(before) == {}


@pytest.mark.long
@pytest.mark.slow
def test_fifty_partial_iterators_leave_nothing(loader_class: type) -> None:
    rows = TensorDataset(torch.arange(400.0).view(100, 4))
    iterator = iter(loader_class(rows, batch_size=5, num_workers=1))
    next(iterator)
    del iterator
    process_traces.join_feeder_threads()
    gc.collect()
    before = process_traces.take()
    threads = process_traces.native_threads()
    for repeat in range(50):
        iterator = iter(loader_class(rows, batch_size=5, num_workers=1))
        for _ in range(repeat % 4):
            next(iterator)
        del iterator
    assert process_traces.left_since(before) == {}
    assert process_traces.native_threads() <= threads


def test_persistent_epochs_accumulate_no_resources(loader_class: type) -> None:
    loader = loader_class(
        Computed(20, number), batch_size=2, num_workers=2, persistent_workers=True
    )
    list(loader)
    gc.collect()
    before = process_traces.take()
    for _ in range(10):
        next(iter(loader))
    list(loader)
    assert process_traces.left_since(before) == {}


def test_finished_epoch_leaves_nothing_while_the_loader_lives(loader_class: type) -> None:
    before = process_traces.take()
    loader = loader_class(Computed(6, number), num_workers=2)
    iterator = iter(loader)
    assert sum(1 for _ in iterator) == 6
    process_traces.join_feeder_threads()
    assert process_traces.take().since(before).get("children") is None
    del iterator
    assert process_traces.left_since(before) == {}


@pytest.mark.parametrize("fail", ["dataset", "collate_fn", "worker_init_fn", "sampler"])
def test_epoch_ended_by_an_error_leaves_nothing(loader_class: type, fail: str) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    options: dict[str, Any] = {"num_workers": 2}
    dataset = Computed(6, broken if fail == "dataset" else number)
    if fail == "sampler":
        options["sampler"] = (broken() for _ in range(1))
    elif fail != "dataset":
        options[fail] = broken
    before = process_traces.take()
    loader = loader_class(dataset, **options)
    try:
        for _ in loader:
            pass
    except ValueError as error:
        without_frames(error)
    assert process_traces.left_since(before) == {}


def test_kept_batches_hold_memory_only_until_dropped(loader_class: type) -> None:
    before = process_traces.take()
    batches = list(
        loader_class(Computed(50, lambda index: torch.ones(10_000)), batch_size=5, num_workers=2)
    )
    gc.collect()
    process_traces.join_feeder_threads()
    assert "children" not in process_traces.take().since(before)
    batches.clear()
    assert process_traces.left_since(before) == {}


def test_workers_inherit_no_descriptors_of_ended_workers(
    loader_class: type,
) -> None:
    """Descriptors that pile up in forked workers would end at the limit of open files."""

    def count(index: int) -> int:
        return len(os.listdir("/proc/self/fd"))

    loaders = 12
    counts = []
    for _ in range(loaders):
        counts.extend(int(batch) for batch in loader_class(Computed(1, count), num_workers=1))
    # One left by each loader would add up; one that a thread is just closing does not.
    assert counts[-1] - counts[0] < loaders // 2


def test_partial_iterable_epoch_leaves_nothing(loader_class: type) -> None:
    before = process_traces.take()
    iterator = iter(loader_class(Streamed(partial(range, 100)), batch_size=3, num_workers=2))
    for _ in range(5):
        next(iterator)
    del iterator
    assert process_traces.left_since(before) == {}
