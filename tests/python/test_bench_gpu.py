# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of the benches for GPUs, on the CPU and on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_runs import BENCH, run_bench

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_every_case_writes_records(tmp_path: Path) -> None:
    lines = tmp_path / "gpu.jsonl"
    done = run_bench("gpu.py", "--quick", "--device", "cpu", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {record["name"] for record in records} == {
        "gpu/copy/gb_per_s",
        "gpu/feed/gb_per_s",
        "gpu/feed/pinned_over_device",
        "gpu/widen/gb_per_s",
        "gpu/widen/of_bandwidth",
        "gpu/bound/steps_per_s",
        "gpu/bound/of_resident",
        "gpu/images/steps_per_s",
    }
    assert all(record["median"] > 0 and record["device"] == "cpu" for record in records)
    again = run_bench("gpu.py", "--read", str(lines), "--markdown")
    assert again.returncode == 0 and "| `gpu/images/steps_per_s` " in again.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_missing_gpu_is_reported() -> None:
    done = run_bench("gpu.py", "--quick")
    assert done.returncode == 2
    assert "torch found no CUDA device" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("parts", [["styles", "loaders"], ["compiled", "pool"], ["rates", "bits"]])
def test_training_on_the_simulated_gpu_matches_torch(parts: list[str], tmp_path: Path) -> None:
    options = ["--quick", "--device", "simgpu", "--minutes", "20", "--out", str(tmp_path)]
    done = run_bench("gpu_programs.py", *options, "--only", *parts, seconds_max=1300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [part["part"] for part in results["parts"]] == parts
    for part in parts:
        rows = [row for row in results["rows"] if row["part"] == part]
        assert rows and all(row.get("equal") is not False for row in rows)
        assert f"{part}: ok ({len(rows)} results" in done.stdout
    for row in results["rows"]:
        assert f"| {row['part']} | {row['case']} |" in (tmp_path / "results.md").read_text()


def test_parts_not_run_are_named_and_fail_the_run(tmp_path: Path) -> None:
    done = run_bench(
        "gpu_programs.py", "checks", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path)
    )
    assert done.returncode == 1, done.stderr
    for part in ("styles", "compiled", "frameworks", "pool", "loaders"):
        assert f"{part}: FAILED not run: time limit of 0 minutes" in done.stdout
        assert f"| {part} | | | FAILED |" in (tmp_path / "results.md").read_text()


def test_network_without_torchvision_is_a_resnet50(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    network = pytest.importorskip("gpu_resnet").ResNet50()
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)
