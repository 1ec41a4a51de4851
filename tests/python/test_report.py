# SPDX-License-Identifier: Apache-2.0
"""loader.report(): how the time of an epoch was spent, for people and for programs.

The text is tested on made-up figures; on a real loader, the test is that the figures are that
loader's.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.loader.loader_run import run_of
from penstock.loader.options import LoaderOptions
from penstock.loader.stats import LoaderReport, LoaderStats, make_report
from penstock.loader.step_times import SlowSample, StepTimes, WorkerTimes


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_report_of_a_finished_epoch_matches_stats(workers: int, persistent: bool) -> None:
    loader = DataLoader(
        Samples(),
        batch_size=4,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )
    assert len(list(loader)) == 16

    report = loader.report()

    stats = loader.stats()
    assert (report.ledger, report.workers) == (stats.ledger, stats.workers)
    assert report.ledger.steps == 16
    assert report.slow_samples == stats.slow_samples
    assert report.advice and report.limit
    assert set(report.workers) == set(range(workers))
    text = str(report)
    assert text.startswith(f"DataLoader ({report.iterator}) took 16 steps of ")
    for worker in range(workers):
        assert f"worker {worker} made {16 // workers} batches" in text
    record = json.loads(report.to_json())
    assert record["ledger"] == asdict(report.ledger)
    assert record["waiting_share"] == report.ledger.waiting_share
    assert record["workers"] == {str(n): asdict(one) for n, one in report.workers.items()}
    assert record["slow_samples"] == [asdict(one) for one in report.slow_samples]
    assert (record["limit"], record["advice"]) == (report.limit, report.advice)


def report_of(loader: Any, **parts: float) -> LoaderReport:
    """The ledger of 16 steps with this many seconds in each part; a worker made the batches in
    these."""
    made = {name: parts.get(name, 0.0) for name in ("dataset_s", "collate_s")}
    workers = {0: WorkerTimes(16, **made, waited_s=0.5)} if loader.num_workers else {}
    stats = LoaderStats(
        iterator="penstock",
        batches=16 if loader.num_workers else 0,
        ledger=StepTimes(16, **parts),
        workers=workers,
        slow_samples=(SlowSample(0.3, 37, 9, 1, 0), SlowSample(0.01, 2, 0, 2, 0)),
        **(made if loader.num_workers else {}),
    )
    run = run_of(loader)
    run.iter_count = 1
    return make_report(LoaderOptions.of(loader), run, stats)


def test_report_lists_waits_longest_first() -> None:
    loader = DataLoader(Samples(), batch_size=4, num_workers=1, persistent_workers=True)

    report = report_of(loader, compute_s=0.4, collate_s=0.4, dataset_s=0.8)

    assert str(report).splitlines()[:5] == [
        "DataLoader (penstock) took 16 steps of 100 ms, and waited for batches 75 % of the time",
        "  for the dataset: 50 ms a step, 50 %",
        "  for collating: 25 ms a step, 25 %",
        "  worker 0 made 16 batches (samples 50 ms, collating 25 ms each), for which the program "
        "waited 500 ms",
        "  slowest: sample 37 took 300 ms, sample 2 took 10 ms",
    ]


def test_slow_dataset_without_workers_is_advised_num_workers() -> None:
    report = report_of(DataLoader(Samples(), batch_size=4), compute_s=0.08, dataset_s=0.13)

    assert report.limit == "workers"
    assert "num_workers=" in report.advice and report.advice in str(report)


def test_busy_program_is_limited_by_trainer() -> None:
    loader = DataLoader(Samples(), batch_size=4, num_workers=1, persistent_workers=True)

    assert report_of(loader, compute_s=1.3, dataset_s=0.01).limit == "trainer"


def test_report_before_any_step_has_no_advice() -> None:
    report = DataLoader(Samples()).report()

    assert report.limit == "" and report.advice == ""
    assert "no steps yet" in str(report)
