# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of bench/start.py: it runs, and a line has time and memory of a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "start.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.long
def test_command_record_has_time_and_memory(tmp_path: Path) -> None:
    names = [
        "python",
        "import_penstock",
        "version",
        "typo",
        "keys",
        "status",
        "drain",
        "controller",
    ]
    lines = tmp_path / "start.jsonl"
    python = os.path.relpath(sys.executable)
    done = run_bench("--quick", "--only", *names, "--python", python, "--out", str(lines))
    assert done.returncode == 0, done.stderr
    *starts, foreign = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["name"] for record in starts] == [f"start/{name}/start_s" for name in names]
    assert foreign["name"] == "start/foreign_cores"
    for record in starts:
        assert set(record) >= {
            "name", "parameters", "median", "p10", "p90", "n", "commit", "machine",
        }  # fmt: skip
        assert record["parameters"] == {"python": sys.executable}
        assert 0 < record["median"] and 5e6 < record["peak_rss_bytes"] < 60e6
    again = run_bench("--read", str(lines), "--markdown")
    assert again.returncode == 0 and "| `version` " in again.stdout


@pytest.mark.long
def test_unknown_case_is_rejected_by_name() -> None:
    done = run_bench("--only", "statsu")
    assert done.returncode == 2
    assert "--only must be one of python, import_torch," in done.stderr
    assert "got statsu" in done.stderr
