# SPDX-License-Identifier: Apache-2.0
"""bench/calibrate.py: its predictions for jobs, and a smoke run on a live pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import output_of_bench

pytestmark = pytest.mark.slow


def record(figure: str, median: float, **job: float) -> dict[str, Any]:
    parameters = {"case": "one", "workers": 4, "workers_min": 4, **job}
    return {
        "name": f"calibrate/one/0/{figure}",
        "parameters": parameters,
        "median": median,
        "p10": median,
        "p90": median,
        "n": 1,
        "commit": "none",
        "machine": "none",
    }


# With 2 useful workers a job runs at the pace of its trainer; with 8, at half of it.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("worker_s", "predicted"), [(0.2, 101.0), (0.8, 201.0)])
def test_predicted_job_time_is_bound_by_trainer_or_workers(
    tmp_path: Path, worker_s: float, predicted: float
) -> None:
    job = {"arrives_s": 0, "worker_s": worker_s, "step_s": 0.1, "batches": 1000}
    lines = [record("completion_s", 2 * predicted, **job), record("first_batch_s", 1.0, **job)]
    figures = tmp_path / "figures.jsonl"
    figures.write_text("\n".join(json.dumps(line) for line in lines))
    cells = output_of_bench("calibrate.py", "--read", str(figures)).splitlines()[-1].split(" | ")
    assert float(cells[-2]) == pytest.approx(predicted, rel=0.01)
    assert cells[-1].startswith("0.50")


@pytest.mark.long
def test_live_jobs_are_measured_and_predicted(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    quick = ("--quick", "--rounds", "1", "--workers", "2", "--only", "one", "two")
    out = output_of_bench("calibrate.py", *quick, "--out", str(lines))
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["name"].rpartition("/")[2] for one in records] == 3 * [
        "completion_s",
        "first_batch_s",
    ]
    assert all(one["median"] > 0 for one in records)
    assert [line.split(" | ")[0] for line in out.splitlines()[-3:]] == ["| one", "| two", "| two"]
