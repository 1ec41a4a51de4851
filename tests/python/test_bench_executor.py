# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of bench/executor.py: it runs, its lines are complete, and the compared results are
equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import run_bench


@pytest.mark.long
@pytest.mark.slow
def test_case_has_time_and_ratio_records(tmp_path: Path) -> None:
    lines = tmp_path / "executor.jsonl"
    done = run_bench("executor.py", "--quick", "--only", "tabular", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    assert "| `tabular` |" in done.stdout
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for record in records:
        assert set(record) >= {
            "name", "parameters", "median", "p10", "p90", "n", "commit", "machine",
        }  # fmt: skip
    times = [record for record in records if record["name"] == "executor/tabular/batch_us"]
    assert [time["parameters"]["kind"] for time in times] == ["eager", "executor", "torchscript"]
    assert all(time["median"] > 0 and time["n"] >= 3 for time in times)
    assert times[0]["parameters"]["equal"] == dict.fromkeys(times[0]["parameters"]["equal"], True)
    ratios = [record for record in records if record["name"] == "executor/tabular/ratio"]
    assert [ratio["parameters"]["kind"] for ratio in ratios] == ["executor", "torchscript"]
    again = run_bench("executor.py", "--read", str(lines))
    assert again.returncode == 0 and "| `tabular` |" in again.stdout


@pytest.mark.long
@pytest.mark.slow
def test_unknown_case_is_rejected_by_name() -> None:
    done = run_bench("executor.py", "--quick", "--only", "tabula")
    assert done.returncode == 2
    assert "--only must be one of audio, tabular," in done.stderr
    assert "got tabula" in done.stderr
