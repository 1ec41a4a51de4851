# SPDX-License-Identifier: Apache-2.0
"""The pool's protocol holds in thousands of simulated pools, and its simulator finds planted bugs.

`make test-sim` runs 200,000.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from mutants import MUTANTS
from simulation import build, built_once, run

SEEDS = 2_000
MUTANT_SEEDS = 60_000  # at most; a run ends with the first seed that fails


@pytest.fixture(scope="module")
def program() -> Path:
    return built_once()


@pytest.mark.slow
def test_simulated_pools_keep_their_invariants(program: Path) -> None:
    outcome = run(program, SEEDS)
    assert outcome.failed == 0, outcome.said


@pytest.mark.slow
def test_seed_replays_the_same_run(program: Path) -> None:
    traces = {
        subprocess.run([program, "--replay", "77"], capture_output=True, check=True).stdout
        for _ in range(3)
    }
    assert len(traces) == 1
    assert len(next(iter(traces)).splitlines()) > 50


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("bug", MUTANTS)
def test_planted_bug_is_found(bug: str, program: Path, tmp_path: Path) -> None:
    mutated = build(tmp_path / "sim", MUTANTS[bug], program.parent)
    outcome = run(mutated, MUTANT_SEEDS, stop_at_first=True)
    assert outcome.failed, f"no schedule of {MUTANT_SEEDS} shows that {bug}"
