# SPDX-License-Identifier: Apache-2.0
"""Runs rank_job.py under torchrun on the loopback interface, and reads the output of its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = Path(__file__).with_name("rank_job.py")
SECONDS_MAX = 200.0
LENGTH, STEP_SIZE = 60, 12
_EXIT_SECONDS_MAX = 20.0
_LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
_LOOPBACK = ["--rdzv-backend=c10d", "--local-addr=127.0.0.1"]


class Step(NamedTuple):
    """A step of a job, over all its ranks, in the order of the ranks."""

    indices: list[int]
    inputs: list[list[float]]  # the samples, augmented
    losses: list[float]  # of each rank


def torchrun(
    folder: Path,
    world_size: int,
    *,
    restarts: int = 0,
    is_store_shared: bool = False,
    seconds_max: float = SECONDS_MAX,
    **given: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the job to its end. If it takes too long, ends it and returns 124."""
    arguments = [f"--nproc-per-node={world_size}", f"--max-restarts={restarts}"]
    endpoint = ["--rdzv-endpoint=127.0.0.1:0"]
    process = start([*arguments, *endpoint], folder, is_store_shared=is_store_shared, **given)
    try:
        out, err = process.communicate(timeout=seconds_max)
        code = process.returncode
    except subprocess.TimeoutExpired:
        code, (out, err) = 124, end(process, folder)
    wait_until_gone(folder)
    return subprocess.CompletedProcess(process.args, code, out, err)


def start(
    arguments: list[str], folder: Path, *, is_store_shared: bool = False, **given: Any
) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    if not is_store_shared:
        # Attempts must not share a store: torch's rendezvous fails with a shared one.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(
        [*_LAUNCHER, *_LOOPBACK, *arguments, PROGRAM, folder, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def end(process: subprocess.Popen[str], folder: Path) -> tuple[str, str]:
    """End a launcher and its ranks. Returns their output."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_SECONDS_MAX)
    kill_all(folder)
    process.wait()
    return process.communicate() if process.stdout and not process.stdout.closed else ("", "")


def kill_all(folder: Path) -> None:
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Return the launchers, the ranks and their loaders' workers, whose commands all contain the
    folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def wait_until_gone(folder: Path) -> None:
    """Wait until workers of a killed rank have noticed its end and are gone."""
    deadline = time.monotonic() + _EXIT_SECONDS_MAX
    while left := processes_of(folder):
        if time.monotonic() > deadline:
            kill_all(folder)
            raise AssertionError(f"processes {left} of the job outlived it")
        time.sleep(0.05)


def steps_of(folder: Path, world_size: int) -> dict[int, Step]:
    """Return the steps by number. If a step was repeated after a restart, the last repetition
    counts."""
    steps: dict[int, Step] = {}
    for rank in range(world_size):
        for number, (indices, inputs, loss) in lines_of(folder, rank).items():
            step = steps.setdefault(number, Step([], [], []))
            step.indices.extend(indices)
            step.inputs.extend(inputs)
            step.losses.append(loss)
    return steps


def lines_of(folder: Path, rank: int) -> dict[int, tuple[list[int], list[list[float]], float]]:
    """Return a rank's part of each step. It is the same in every repetition."""
    found: dict[int, Any] = {}
    for line in (folder / f"rank-{rank}").read_text().splitlines():
        number, *part = json.loads(line)
        assert found.setdefault(number, part) == part, f"step {number} was another when made again"
    return found


def forget_steps(folder: Path) -> None:
    """Remove the output of the ranks, for a job of another size that resumes from the state."""
    for path in folder.glob("rank-*"):
        path.unlink()
