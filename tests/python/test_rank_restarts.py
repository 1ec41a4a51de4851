# SPDX-License-Identifier: Apache-2.0
"""Ranks of torchrun's jobs are killed in mid-epoch: the job is restarted, at its size or at another
one, and every later loss equals the loss of an uninterrupted job."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from torchrun_jobs import (
    LENGTH,
    SECONDS_MAX,
    STEP_SIZE,
    Step,
    end,
    forget_steps,
    kill_all,
    start,
    steps_of,
    torchrun,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

STEPS = LENGTH // STEP_SIZE
# torch's agents detect after this long that one of them is gone.
ELASTIC = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


def assert_every_sample_once(steps: dict[int, Step]) -> None:
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert sorted(index for step in steps.values() for index in step.indices) == [*range(LENGTH)]


@pytest.mark.long("ddp-4", "fsdp2-2", "fsdp2-4")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_restarted_rank_matches_uninterrupted_losses(
    wrap: str, world_size: int, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder, kill in [(whole, None), (killed, [0, 1, 3])]:
        folder.mkdir()
        # The state was saved after step 2, so step 3 is made twice.
        options: dict[str, Any] = {"wrap": wrap, "workers": 1, "save_every": 2, "kill": kill}
        done = torchrun(folder, world_size, restarts=2, **options)
        assert done.returncode == 0, done.stderr
    assert (killed / "joined-1-0").exists()
    assert_every_sample_once(steps_of(killed, world_size))
    assert steps_of(killed, world_size) == steps_of(whole, world_size)


def run_at_sizes(
    folder: Path, sizes: list[tuple[int, int | None]], *, is_killed: bool = False, **given: Any
) -> dict[int, Step]:
    """A job at one number of ranks after the other. Each stops after a step, or is killed in the
    next one; the last one runs to the end."""
    seen: dict[int, Step] = {}
    folder.mkdir()
    for world_size, last in sizes:
        end_of_it: dict[str, Any] = {"steps": last}
        if is_killed and last is not None:
            end_of_it = {"kill": [0, world_size - 1, last]}
        done = torchrun(folder, world_size, **end_of_it, **given)
        assert (done.returncode == 0) == ("kill" not in end_of_it), done.stderr
        seen |= steps_of(folder, world_size)
        forget_steps(folder)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_killed_job_resumes_like_a_stopped_one(wrap: str, tmp_path: Path) -> None:
    sizes = [(4, 2), (2, 3), (1, None)]
    killed = run_at_sizes(tmp_path / "killed", sizes, is_killed=True, wrap=wrap, workers=1)
    assert_every_sample_once(killed)
    assert killed == run_at_sizes(tmp_path / "stopped", sizes, wrap=wrap, workers=1)


@pytest.mark.long
def test_job_continues_on_the_remaining_node(tmp_path: Path) -> None:
    """One job of 2 nodes of 2 ranks each. One node is killed, and torchrun restarts the ranks of
    the other."""
    job, stopped = tmp_path / "job", tmp_path / "stopped"
    nodes = [tmp_path / "first", tmp_path / "second"]  # links, to find each node's processes
    job.mkdir()
    for node in nodes:
        node.symlink_to(job)
    arguments = ["--nproc-per-node=2", "--nnodes=1:2", "--max-restarts=3", "--rdzv-id=job"]
    arguments.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    launchers = [
        start([*arguments, f"--rdzv-conf={ELASTIC},is_host={host}"], node, workers=1, pause=2)
        for host, node in zip(("true", "false"), nodes, strict=True)
    ]
    try:
        wait_for([job / f"paused-{rank}" for rank in range(4)])
        seen = steps_of(job, 4)
        forget_steps(job)
        kill_all(nodes[1])
        (job / "go").touch()
        _, err = launchers[0].communicate(timeout=SECONDS_MAX)
        assert launchers[0].returncode == 0, err
    finally:
        for launcher, node in zip(launchers, nodes, strict=True):
            end(launcher, node)
            wait_until_gone(node)
    seen |= steps_of(job, 2)
    assert_every_sample_once(seen)
    assert seen == run_at_sizes(stopped, [(4, 2), (2, None)], workers=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(files: list[Path]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, [file.name for file in files if not file.exists()]
        time.sleep(0.05)
