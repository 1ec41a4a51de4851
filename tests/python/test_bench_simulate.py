# SPDX-License-Identifier: Apache-2.0
"""Smoke run of bench/simulate.py: its table, its lines and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from bench_runs import run_bench

ROOT = Path(__file__).resolve().parents[2]


def test_case_has_a_row_policy_records_and_bars(tmp_path: Path) -> None:
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.svg"
    trace = str(ROOT / "tests" / "data" / "philly_jobs.csv")
    done = run_bench(
        "simulate.py",
        *("--jobs", trace, "--only", "goal", "--first", "40", "--seeds", "2", "--markdown"),
        *("--out", str(lines), "--picture", str(picture)),
        seconds_max=120,
    )
    assert done.returncode == 0, done.stderr
    assert "\n| goal | " in done.stdout
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["n"] for record in records] == [2] * 7
    assert len(ElementTree.parse(picture).findall("{*}rect")) == 1 + 7 + 7


def test_missing_trace_is_an_error(tmp_path: Path) -> None:
    done = run_bench(
        "simulate.py", "--jobs", str(tmp_path / "none.csv"), "--only", "goal", seconds_max=120
    )
    assert done.returncode == 2 and "none.csv" in done.stderr
