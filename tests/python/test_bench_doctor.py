# SPDX-License-Identifier: Apache-2.0
"""A smoke run of bench/doctor.py: it searches, asks the doctor, and compares the two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import output_of_bench, run_bench

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_workload_record_has_search_and_advice(tmp_path: Path) -> None:
    lines = tmp_path / "doctor.jsonl"

    shown = output_of_bench(
        "doctor.py", "--quick", "--only", "nested", "--data", str(tmp_path), "--out", str(lines)
    )

    record = json.loads(lines.read_text())
    assert record["name"] == "doctor/nested/ratio"
    facts = record["parameters"]
    assert facts["searched"] == 4
    assert facts["trials"] <= 5
    assert set(facts["advice"]) == {"num_workers", "fetch_threads", "prefetch_factor"}
    assert record["median"] > 0
    assert "| `nested` |" in shown


def test_unknown_workload_is_rejected_by_name() -> None:
    done = run_bench("doctor.py", "--only", "tniy")

    assert done.returncode == 2
    assert "--only must be one of large, tiny," in done.stderr
    assert "got tniy" in done.stderr
