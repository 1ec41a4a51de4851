# SPDX-License-Identifier: Apache-2.0
"""Jobs of several real ranks, started by torchrun over gloo: stopped and resumed at another size,
and informed of differences."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun_jobs import LENGTH, Step, forget_steps, steps_of, torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted job of 2 ranks."""
    folder = tmp_path_factory.mktemp("whole")
    done = torchrun(folder, 2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_stopped_job_resumes_with_other_rank_counts(whole: Path, tmp_path: Path) -> None:
    expected = steps_of(whole, 2)
    assert sorted(sum((step.indices for step in expected.values()), [])) == list(range(LENGTH))
    seen: dict[int, Step] = {}
    for world_size, steps in [(4, 2), (1, 3), (2, None)]:
        done = torchrun(tmp_path, world_size, steps=steps, workers=1)
        assert done.returncode == 0, done.stderr
        seen |= steps_of(tmp_path, world_size)
        forget_steps(tmp_path)
    for number, step in expected.items():
        assert seen[number].indices == step.indices
        assert seen[number].inputs == step.inputs, "the same augmentation for any number of ranks"


def test_different_rank_datasets_raise_before_first_batch(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, lengths=[60, 59])
    assert done.returncode != 0
    for mine, theirs in [(0, 1), (1, 0)]:
        counts = [60, 59]
        message = (
            f"the loaders of the ranks differ: rank {mine} has dataset length {counts[mine]} and "
            f"rank {theirs} has dataset length {counts[theirs]}"
        )
        assert message in done.stderr
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.long
def test_error_names_missing_rank(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, absent=1, wait_s=4)
    assert done.returncode != 0
    assert "rank 0 of 2 has waited" in done.stderr
    assert "s for rank 1 to start an epoch of its loader with ranks=Ranks(" in done.stderr
