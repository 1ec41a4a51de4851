# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of bench/rank_restarts.py and bench/rank_losses.py: their tables."""

from __future__ import annotations

import pytest
from bench_runs import output_of_bench

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_restarts_are_counted_per_store() -> None:
    """Failures of torch's rendezvous with the shared store are counted, and are not penstock's
    fault."""
    out = output_of_bench("rank_restarts.py", "--quick", "--markdown", seconds_max=280)
    rows = [line.split("|")[1:-1] for line in out.splitlines() if "| ddp" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[:4] for row in cells] == [
        ["of each attempt", "2", "ddp", "1"],
        ["shared", "2", "ddp", "1"],
    ]
    assert cells[0][4:] == ["1", "0"]


def test_samples_and_inputs_are_equal_at_all_sizes() -> None:
    out = output_of_bench("rank_losses.py", "--markdown", seconds_max=280)
    rows = [line for line in out.splitlines() if "| equal" in line]
    assert len(rows) == 5 and "OTHER" not in out
