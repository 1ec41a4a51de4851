# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of bench/cut.py: it runs, its lines are complete, and its models have a part to
move."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_runs import run_bench

import penstock

BENCH = Path(__file__).resolve().parents[2] / "bench"
WORKLOADS = (
    "audio", "tabular", "resize", "one_hot", "one_hot_ready", "frames", "frames_resized",
)  # fmt: skip


def records_of(lines: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a quick run."""
    done = run_bench("cut.py", "--quick", *arguments, "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for record in records:
        assert set(record) >= {
            "name", "parameters", "median", "p10", "p90", "n", "commit", "machine",
        }  # fmt: skip
    return records


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch, on_one_thread: None) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return pytest.importorskip("cut_workloads")


@pytest.mark.long
@pytest.mark.slow
def test_workload_has_rate_plan_and_ratio_records(tmp_path: Path) -> None:
    records = records_of(tmp_path / "cut.jsonl", "--only", "tabular")
    rates = [record for record in records if record["name"] == "cut/tabular/steps_per_s"]
    kinds = [record["parameters"]["kind"] for record in rates]
    assert kinds == ["eager", "none", "maximal", "auto"]
    assert all(record["median"] > 0 and record["n"] == 1 for record in rates)
    moved = {
        record["parameters"]["kind"]: record["median"]
        for record in records
        if record["name"] == "cut/tabular/moved_calls"
    }
    assert moved["none"] == 0 < moved["maximal"]
    overs = [
        record["parameters"]["over"]
        for record in records
        if record["name"] == "cut/tabular/ratio" and record["parameters"]["kind"] == "auto"
    ]
    assert overs == ["better", "none", "maximal", "eager"]
    again = run_bench("cut.py", "--read", str(tmp_path / "cut.jsonl"))
    assert again.returncode == 0, again.stderr
    assert "| tabular" in again.stdout and "auto / better" in again.stdout


@pytest.mark.long
@pytest.mark.slow
def test_overhead_record_is_complete(tmp_path: Path) -> None:
    lines = tmp_path / "overhead.jsonl"
    records = records_of(lines, "--overhead", "--only", "several_graphs")
    overhead = next(r for r in records if r["name"] == "cut/overhead/several_graphs/overhead_us")
    assert overhead["n"] == overhead["parameters"]["steps_of_a_process"] == 20
    assert overhead["parameters"]["graphs"] == 3
    low, high = overhead["interval"]
    assert low <= overhead["median"] <= high


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_trains_and_has_movable_operations(workloads: ModuleType, name: str) -> None:
    assert tuple(workloads.WORKLOADS) == WORKLOADS
    workload = workloads.WORKLOADS[name]
    dataset = workload.make_dataset(4)
    batch = torch.utils.data.default_collate([dataset[index] for index in range(4)])
    model = workload.make_model()
    loss = workload.loss(model, batch)
    loss.backward()
    assert torch.isfinite(loss)
    plan = penstock.explain(
        model, batch, call=lambda m, b: workload.loss(m, b), cut="maximal", worker_count=1
    )
    assert plan.refused is None and plan.moved


@pytest.mark.long
@pytest.mark.slow
def test_unknown_workload_is_rejected_by_name() -> None:
    done = run_bench("cut.py", "--only", "adio")
    assert done.returncode == 2
    assert "--only must be one of audio, tabular" in done.stderr
    assert "got adio" in done.stderr
