# SPDX-License-Identifier: Apache-2.0
"""A loader's text reports about itself, and that its warnings can be distinguished."""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings
from typing import Any

import pytest
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader
from penstock.loader.stats import LoaderStats
from penstock.loader.step_times import StepTimes
from penstock.tuning.observation import format_share


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def test_stats_before_first_epoch_say_not_iterated() -> None:
    assert str(DataLoader([1]).stats()) == "DataLoader has not been iterated over"


def test_stats_are_formatted_as_sentences() -> None:
    counted = LoaderStats(
        iterator="penstock",
        batches=10,
        batch_bytes=25_000_000,
        ledger=StepTimes(steps=10, compute_s=1.0, dataset_s=2.5, order_s=0.5),
        fetch_s=0.215,
        prefix_s=0.05,
        boundary_batches=8,
        copied_batches=2,
        ready=1,
        outstanding=3,
    )
    assert str(counted).splitlines() == [
        "DataLoader (penstock) delivered 10 batches of 2.5 MB in 4 s, and the trainer waited 75 % "
        "of that time",
        "  workers spent 21.5 ms on a batch, 5 ms of it on calls that offload() moved, in 8 "
        "batches",
        "  1 batches are ready and 3 are requested",
        "  a step took 400 ms: 100 ms (25 %) computing, 0 µs (0 %) in the loader, and waiting for "
        "the dataset 250 ms (62 %), the batch whose turn it is 50 ms (12 %)",
        "  2 were copied, because the program holds many other batches",
    ]
    unwatched = dataclasses.replace(counted, ledger=StepTimes())
    assert "trainer waited 0 %" in str(unwatched)


@pytest.mark.slow
def test_stats_count_batches_and_bound_the_waiting_time() -> None:
    loader = DataLoader(Numbers(), batch_size=8, num_workers=1)
    batches = list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.ready, stats.outstanding) == (5, 0, 0)
    assert stats.batch_bytes == sum(batch.nbytes for batch in batches)
    assert stats.epochs_s >= stats.wait_s > 0
    # In nanoseconds, as they are counted: a sum of seconds is rounded.
    fetch, made, collated = (
        round(seconds * 1e9) for seconds in (stats.fetch_s, stats.dataset_s, stats.collate_s)
    )
    assert fetch >= made + collated > 0
    assert "delivered 5 batches of" in str(stats)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_report_and_stats_show_the_same_waiting_share(workers: int) -> None:
    """The report had 18 % in its first line and 66 % in its advice, and stats() had 65 %."""
    loader = DataLoader(Numbers(), batch_size=4, num_workers=workers)
    for _ in loader:
        pass
    report, stats = loader.report(), loader.stats()
    share = format_share(report.ledger.waiting_share)
    assert report.ledger == stats.ledger
    said = re.findall(r"wait(?:s|ed)(?: for batches)?(?: for)? (\d+ %) of", f"{report}\n{stats}")
    assert len(said) >= 2 and set(said) == {share}, f"{report}\n{stats}"


def test_pool_warnings_can_be_filtered_by_category(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", "tcp://127.0.0.1:7000")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader([1])
        warnings.simplefilter("ignore", penstock.PoolWarning)
        DataLoader([2])
    assert [(one.category, "7000" in str(one.message)) for one in caught] == [
        (penstock.PoolWarning, True)
    ]


class HasLock(Numbers):
    def __init__(self) -> None:
        self.cache = {"of": [threading.Lock()]}


@pytest.mark.slow
def test_unpicklable_attribute_for_spawned_workers_is_named() -> None:
    loader: Any = DataLoader(HasLock(), num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(TypeError) as caught:
        iter(loader)
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    note = caught.value.__notes__[-1]  # after the warnings of Python 3.14's pickle, one an object
    assert note.startswith("dataset.cache['of'][0], a lock, cannot be pickled"), note
