# SPDX-License-Identifier: Apache-2.0
"""Jobs of several real ranks, started by torchrun over gloo: stopped, resumed at another size,
killed and restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("rank_job.py")
SECONDS_MAX = 200
LENGTH, STEP_SIZE = 60, 12


def torchrun(
    folder: Path, world_size: int, *, restarts: int = 0, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the job to its end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # The store of one attempt is not that of the next: torch's own rendezvous fails with it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return subprocess.run(
        [*command, f"--max-restarts={restarts}", *rendezvous, PROGRAM, folder, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        env=environment,
    )


def given_to(folder: Path, world_size: int) -> dict[int, list[int]]:
    """The indices of each step, over all ranks, in the order of the ranks."""
    steps: dict[int, list[int]] = {}
    for rank in range(world_size):
        lines = (folder / f"rank-{rank}").read_text().splitlines()
        # A step that was not saved is made again after a restart.
        of_rank = {step: indices for step, indices, _ in map(json.loads, lines)}
        for step, indices in of_rank.items():
            steps.setdefault(step, []).extend(indices)
    return steps


def losses(folder: Path, rank: int) -> dict[int, float]:
    lines = (folder / f"rank-{rank}").read_text().splitlines()
    return {step: loss for step, _, loss in map(json.loads, lines)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 2 ranks that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    done = torchrun(folder, 2)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_job_is_stopped_and_goes_on_with_other_ranks(whole: Path, tmp_path: Path) -> None:
    expected = given_to(whole, 2)
    assert sorted(sum(expected.values(), [])) == list(range(LENGTH))
    seen: dict[int, list[int]] = {}
    for world_size, steps in [(4, 2), (1, 3), (2, None)]:
        done = torchrun(tmp_path, world_size, steps=steps, workers=1)
        assert done.returncode == 0, done.stderr
        seen |= given_to(tmp_path, world_size)
        for rank in range(world_size):
            (tmp_path / f"rank-{rank}").unlink()
    assert seen == expected


def test_a_job_whose_rank_is_killed_is_restarted_and_trains_on(whole: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, restarts=1, kill=[0, 1, 2], workers=1)
    assert done.returncode == 0, done.stderr
    assert given_to(tmp_path, 2) == given_to(whole, 2)
    for rank in range(2):
        assert losses(tmp_path, rank) == losses(whole, rank)


def test_ranks_whose_datasets_differ_are_told_before_the_first_batch(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, lengths=[60, 59])
    assert done.returncode != 0
    for mine, theirs in [(0, 1), (1, 0)]:
        counts = [60, 59]
        message = (
            f"the loaders of the ranks differ: rank {mine} has dataset length {counts[mine]} and "
            f"rank {theirs} has dataset length {counts[theirs]}"
        )
        assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, absent=1, wait_s=4)
    assert done.returncode != 0
    assert "rank 0 of 2 has waited" in done.stderr
    assert "s for rank 1 to begin an epoch of its loader with shard_by_rank" in done.stderr
