# SPDX-License-Identifier: Apache-2.0
"""loader.report(): where the time of an epoch went, for people and for programs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.loader.step_times import PARTS

pytestmark = pytest.mark.slow

SLOW = 37


class Samples(Dataset[Any]):
    """Sleeps for each sample, and far longer for one of them."""

    def __init__(self, sleep_s: float, slow_s: float = 0.0, count: int = 64) -> None:
        self.sleep_s = sleep_s
        self.slow_s = slow_s
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow_s if index == SLOW and self.slow_s else self.sleep_s)
        return torch.tensor(index)


def read(loader: Any, compute_s: float = 0.0) -> None:
    for _ in loader:
        time.sleep(compute_s)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_has_ended_is_reported(workers: int, persistent: bool) -> None:
    loader = DataLoader(
        Samples(0.002),
        batch_size=4,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )
    read(loader)

    report = loader.report()

    ledger = report.ledger
    assert ledger.steps == 16
    # With two workers, the wait for one of them is the order's while the other's batch is here.
    waits = ["dataset_s", "order_s"] if workers > 1 else ["dataset_s"]
    waited = {name: getattr(ledger, name) for name in waits}
    assert sum(waited.values()) > 0.4 * 64 * 0.002 / max(1, workers)
    assert report.advice
    assert set(report.workers) == set(range(workers))
    text = str(report)
    assert text.startswith(f"DataLoader ({report.iterator}) took 16 steps of ")
    assert f"for {PARTS[max(waits, key=waited.__getitem__)]}: " in text
    for worker in range(workers):
        assert f"worker {worker} made {16 // workers} batches" in text


def test_a_dataset_without_workers_gets_some() -> None:
    loader = DataLoader(Samples(0.002), batch_size=4)
    read(loader, 0.005)

    report = loader.report()

    assert report.limit == "workers"
    assert "num_workers=" in report.advice


def test_the_slowest_samples_have_their_indices() -> None:
    loader = DataLoader(Samples(0.001, slow_s=0.3), batch_size=4, num_workers=1)
    read(loader, 0.002)

    report = loader.report()

    assert report.slow_samples[0].index == SLOW
    assert f"slowest: sample {SLOW} took 0.3" in str(report) or f"sample {SLOW} took 3" in str(
        report
    )


def test_a_program_that_is_busy_is_told_so() -> None:
    loader = DataLoader(Samples(0.0), batch_size=4, num_workers=1, persistent_workers=True)
    # Long steps: some waits of a busy machine are no more than a small part of them.
    read(loader, 0.08)
    read(loader, 0.08)

    assert loader.report().limit == "trainer"


def test_a_report_before_any_step_says_so() -> None:
    report = DataLoader(Samples(0.0)).report()

    assert report.limit == "" and report.advice == ""
    assert "no step yet" in str(report)


def test_a_report_is_an_object_of_json() -> None:
    loader = DataLoader(Samples(0.001), batch_size=4, num_workers=1)
    read(loader)

    record = json.loads(loader.report().to_json())

    assert record["ledger"]["steps"] == 16
    assert record["workers"]["0"]["batches"] == 16
    assert 0 < record["waiting_share"] <= 1
    assert record["advice"] and record["limit"]
