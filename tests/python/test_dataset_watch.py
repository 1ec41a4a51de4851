# SPDX-License-Identifier: Apache-2.0
"""When a dataset is checked for changes, how long that may take, and the consequences. Time is an
argument."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import PoolWarning
from penstock.worker.dataset_watch import DatasetWatch


class Looks:
    """A dataset that describes itself, and notes for how long each look may take."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.state: Any = 0
        self.allowed: list[float] = []

    def __call__(self, allowed_s: float) -> Any:
        self.allowed.append(allowed_s)
        return self.state if self.takes_s <= allowed_s else None


def test_unchanged_dataset_is_recognised_at_the_first_inspection() -> None:
    watch = DatasetWatch(Looks())
    assert watch.is_unchanged(0.1)
    assert watch.is_unchanged(0.1)


def test_inspection_time_is_bounded_by_the_batch_time() -> None:
    looks = Looks()
    watch = DatasetWatch(looks)
    for batch_s in (0.0, 0.1, 10.0):
        assert watch.is_unchanged(batch_s)
    assert looks.allowed == [0.005, 0.005, 0.1, 0.25]


def test_dataset_is_compared_with_the_previous_inspection() -> None:
    looks = Looks()
    watch = DatasetWatch(looks)
    looks.state = 1  # such as a file that the first sample opens
    assert not watch.is_unchanged(0.1)
    assert watch.is_unchanged(0.1)


def test_inspections_stop_if_the_dataset_always_changes() -> None:
    looks = Looks()
    watch = DatasetWatch(looks)
    for epoch in range(10):
        looks.state = epoch + 1
        assert not watch.is_unchanged(0.1)
    assert len(looks.allowed) == 4


def test_slow_inspection_is_allowed_with_slow_batches() -> None:
    looks = Looks(takes_s=0.08)
    watch = DatasetWatch(looks)
    assert not watch.is_unchanged(0.1), "the first state is not known"
    assert watch.is_unchanged(0.1)


def test_failed_inspection_is_retried_only_with_twice_the_time() -> None:
    looks = Looks(takes_s=10)
    watch = DatasetWatch(looks)
    for batch_s in (0.009, 0.01, 0.01, 0.019, 0.02, 1, 1, 1):
        assert not watch.is_unchanged(batch_s)
    assert looks.allowed == [0.005, 0.01, 0.02, 0.25]


def test_dropped_batches_without_changes_are_forgotten() -> None:
    watch = DatasetWatch(Looks())
    assert watch.is_unchanged(0.1)
    watch.note_dropped(3)
    assert watch.is_unchanged(0.1)


def test_dropped_batches_that_changed_the_dataset_warn_and_are_the_last() -> None:
    looks = Looks()
    watch = DatasetWatch(looks)
    assert watch.is_unchanged(0.1)
    looks.state = 1
    with pytest.warns(PoolWarning, match="3 batches of the next epoch were made early"):
        watch.note_dropped(3)
    assert looks.allowed[-1] == 0.1
    assert not watch.is_unchanged(0.1)
    assert not watch.is_unchanged(0.1)
