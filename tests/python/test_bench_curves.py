# SPDX-License-Identifier: Apache-2.0
"""bench/worker_curves.py: the profiles that it makes from its measurements, and a smoke run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import output_of_bench

from penstock_simulator import _simulator

pytestmark = pytest.mark.slow


def test_speed_grows_with_cpus_up_to_the_gpu_step(tmp_path: Path) -> None:
    figures = {"worker_s": 0.3, "samples_per_batch": 64, "bytes_per_batch": 640}
    figures["batches_per_s"] = 2.5
    lines = [
        {
            "name": f"worker_curves/text/{metric}",
            "parameters": {"workload": "text", "workers": workers},
            "median": value,
            "machine": "none",
            "commit": "none",
        }
        for workers in (1, 2)
        for metric, value in figures.items()
    ]
    measured, table = tmp_path / "figures.jsonl", tmp_path / "profiles.csv"
    measured.write_text("\n".join(json.dumps(line) for line in lines))
    output_of_bench(
        "worker_curves.py", "--read", str(measured), "--step-s", "0.08", "--profiles", str(table)
    )
    text = table.read_text()
    header, row = (line.split(",") for line in text.splitlines()[-2:])
    assert header[-1] == "cpu5"
    assert row[:5] == ["text", "language", "0.1333", "64", "10"]
    assert [float(speed) for speed in row[5:]] == pytest.approx(
        [0.3333, 0.6667, 1.0, 1.3333, 1.6667], abs=1e-3
    )
    assert len(_simulator.ProfileTable.parse("profiles", text)) == 1


@pytest.mark.long
def test_worker_curve_of_a_workload_is_measured(tmp_path: Path) -> None:
    table = tmp_path / "profiles.csv"
    quick = ("--quick", "--only", "tiny", "--rounds", "1", "--seconds", "0.5", "--warmup", "0.2")
    out = output_of_bench(
        "worker_curves.py", *quick, "--data", str(tmp_path), "--profiles", str(table), "--markdown"
    )
    assert "| tiny | " in out
    assert len(_simulator.ProfileTable.parse("profiles", table.read_text())) == 1
