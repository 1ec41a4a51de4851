# SPDX-License-Identifier: Apache-2.0
"""Programs of bench/, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run_bench(
    name: str, *arguments: str, seconds_max: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run the program in the file ``name``."""
    command = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds_max)


def output_of_bench(name: str, *arguments: str, seconds_max: float = 240) -> str:
    """Run a program that must succeed, and return its output."""
    done = run_bench(name, *arguments, seconds_max=seconds_max)
    assert done.returncode == 0, done.stderr
    return done.stdout
