# SPDX-License-Identifier: Apache-2.0
"""The tests that `make test` leaves to `make test-all`, by their markers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(12))
def test_many(case):
    pass

@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", range(2))
def test_few(case):
    pass

@pytest.mark.long("b")
@pytest.mark.parametrize("case", ["a", "b"])
def test_some(case):
    pass
"""
SAMPLED = ["test_many[2]", "test_many[6]", "test_many[10]"]


def collected(folder: Path, *options: str) -> list[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    lines = done.stdout.splitlines()
    return [line.partition("::")[2] for line in lines if "::" in line]


@pytest.mark.slow
def test_sampled_cases_are_spread_over_all_cases(tmp_path: Path) -> None:
    kept = [*SAMPLED, "test_few[0]", "test_few[1]", "test_some[a]"]
    assert collected(tmp_path) == kept


@pytest.mark.long
@pytest.mark.slow
def test_all_cases_run_with_long_or_k_option(tmp_path: Path) -> None:
    assert len(collected(tmp_path, "--long")) == 16
    assert len(collected(tmp_path, "-k", "many")) == 12
