# SPDX-License-Identifier: Apache-2.0
"""A short form of `make fuzz`, the same inputs each time."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = ROOT / "tests" / "fuzz" / "run.py"
CANARY = re.compile(r"^canary\((\w+) \w+ (\S+)\s+\[=\[(.*?)\]=\]", re.MULTILINE | re.DOTALL)
# Of those that need no torch.
TARGETS = sorted(
    path.name.removesuffix("_fuzz.cpp")
    for path in RUN.parent.glob("*_fuzz.cpp")
    if path.name != "loader_state_fuzz.cpp"
)
NO_TOOLS = 77
# Enough for each canary to be found, with this libFuzzer seed; about a second each.
INPUT_COUNT = 60_000

pytestmark = pytest.mark.slow


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *arguments]
    with (ROOT / "build" / "fuzz.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests share one folder of programs
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode == NO_TOOLS:
        pytest.skip(done.stderr.strip())
    return done


def test_each_canary_pattern_occurs_once_in_its_source() -> None:
    """A change of the sources can break only this property of canaries."""
    text = (ROOT / "tests" / "fuzz" / "CMakeLists.txt").read_text()
    canaries = CANARY.findall(text)
    assert len(canaries) == text.count("\ncanary(") > 30
    counts = {
        name: (ROOT / "csrc" / source).read_text().count(replaced)
        for name, source, replaced in canaries
    }
    assert counts == dict.fromkeys(counts, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", TARGETS)
def test_target_compiles(target: str) -> None:
    """`make test` builds no fuzz targets; a change of the sources can break them."""
    includes = [f"-I{ROOT / folder}" for folder in ("csrc", "tests/cpp/wire")]
    source = str(RUN.parent / f"{target}_fuzz.cpp")
    command = ["c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", *includes, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_every_canary_is_found_and_nothing_else() -> None:
    done = fuzz(f"--runs={INPUT_COUNT}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT found" not in done.stdout and done.stdout.count("was found") >= 6, done.stdout


@pytest.mark.long
def test_canary_of_worker_blobs_is_found() -> None:
    done = fuzz(f"--runs={INPUT_COUNT}", "blob")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT found" not in done.stdout and "was found" in done.stdout, done.stdout


@pytest.mark.long
def test_fuzzer_that_finds_no_canary_fails() -> None:
    # The seeds alone are inputs that every parser accepts.
    done = fuzz("--runs=0", "blob")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT found" in done.stdout
