# SPDX-License-Identifier: Apache-2.0
"""Random sequences of numbers of ranks, kills and resumes: every sample is given once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun_jobs import wait_until_gone

PROGRAM = Path(__file__).with_name("rank_sequences.py")
SECONDS_MAX = 900


@pytest.mark.slow
@pytest.mark.long("50", "3")
@pytest.mark.parametrize("count", [3, 50])
def test_random_kills_and_resumes_yield_each_sample_once(
    count: int, seed: int, tmp_path: Path
) -> None:
    folder = tmp_path / "sequences"
    command = [sys.executable, PROGRAM, folder, "--seed", str(seed), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    wait_until_gone(folder)
    sequences = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [one for one in sequences if one["fault"]] or done.stderr
    assert len(sequences) == count
    assert all(one["samples_given"] == one["samples_expected"] > 0 for one in sequences)
    if count > 10:
        assert sum(one["kills"] for one in sequences) > count / 2
        assert sum(one["resumes"] for one in sequences) > count / 2
