# SPDX-License-Identifier: Apache-2.0
"""The events of loaders and of their steps, on which traces, telemetry and the doctor are based."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.loader.watched_steps import (
    WatchedStep,
    loader_watchers,
    step_watchers,
)

Event = tuple[WatchedStep, Any, Any]


@contextlib.contextmanager
def steps_watched() -> Iterator[list[Event]]:
    events: list[Event] = []

    def note(*event: Any) -> None:
        events.append(event)

    step_watchers.add(note)
    try:
        yield events
    finally:
        step_watchers.remove(note)


def loader_of(kind: str, workers: int) -> DataLoader[Any]:
    rows = torch.arange(8)
    dataset: Any = IterableWrapper(list(rows)) if kind == "datapipe" else TensorDataset(rows)
    persistent = workers > 0
    return DataLoader(dataset, batch_size=4, num_workers=workers, persistent_workers=persistent)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["map", "datapipe"])
def test_each_step_has_its_iterator_and_batch(kind: str, workers: int) -> None:
    loader = loader_of(kind, workers)
    with steps_watched() as events:
        epochs = [list(loader) for _ in range(2)]
    steps = [step for step, _, _ in events]
    assert [(one.number, one.has_batch) for one in steps] == [
        *(2 * [(0, True), (1, True), (2, False)])
    ]
    assert [batch for _, _, batch in events if batch is not None] == [*epochs[0], *epochs[1]]
    assert all(one.loader() is loader for one in steps)
    assert all(iterator.watched_loader() is loader for _, iterator, _ in events)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["map", "datapipe"])
def test_first_step_of_an_epoch_has_the_duration_of_iter(kind: str, workers: int) -> None:
    loader = loader_of(kind, workers)
    with steps_watched() as events:
        for _ in range(2):
            began_at = time.monotonic()
            batches = iter(loader)
            took_s = time.monotonic() - began_at
            assert len(list(batches)) == 2
            first = events[-3][0]
            assert first.iter_s is not None and 0 < first.iter_s <= took_s
    assert [step.iter_s is None for step, _, _ in events] == 2 * [False, True, True]


class Busy(TensorDataset):
    seconds = 0.01  # of a sample

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return super().__getitem__(index)


def test_step_has_the_cpu_time_of_the_thread() -> None:
    with steps_watched() as events:
        list(DataLoader(Busy(torch.arange(4)), batch_size=2))
    of_a_batch = sum([Busy.seconds] * 2)
    assert [step.cpu_s >= of_a_batch for step, _, _ in events] == [True, True, False]


def test_exception_of_a_watcher_reaches_the_program() -> None:
    class Stop(Exception): ...

    def stop(step: WatchedStep, *_: Any) -> None:
        if step.number == 1:
            raise Stop

    batches = iter(loader_of("map", 0))
    step_watchers.add(stop)
    try:
        next(batches)
        with pytest.raises(Stop):
            next(batches)
    finally:
        step_watchers.remove(stop)


def test_loader_watcher_sees_each_new_loader_and_may_change_it() -> None:
    seen = []

    def change(loader: Any) -> None:
        seen.append(loader)
        loader.num_workers, loader.prefetch_factor = 1, 2

    loader_watchers.add(change)
    try:
        loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    finally:
        loader_watchers.remove(change)
    DataLoader(TensorDataset(torch.arange(8)))
    assert seen == [loader]
    assert len(list(loader)) == 2
    assert loader.stats().iterator == "penstock"
