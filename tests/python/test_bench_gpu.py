# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of bench/gpu.py on the CPU: it runs, and each case has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_runs import run_bench

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_every_case_has_figures(tmp_path: Path) -> None:
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
def test_without_a_gpu_it_says_so() -> None:
    done = run_bench("gpu.py", "--quick")
    assert done.returncode == 2
    assert "torch finds no CUDA device here" in done.stderr
