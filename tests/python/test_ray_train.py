# SPDX-License-Identifier: Apache-2.0
"""Ray Train with a pool on the nodes of one Ray cluster: its losses are torch's, bit-for-bit, also
after a rank was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pools import RayPool, needs_ray

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_S_MAX = 500

pytestmark = [pytest.mark.long, pytest.mark.slow, needs_ray]


@pytest.fixture
def on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayPool]:
    pytest.importorskip("ray.train.torch", reason="needs ray[train]")
    one = RayPool(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def losses_in(text: str) -> list[float]:
    (line,) = [line for line in text.splitlines() if line.startswith("losses ")]
    losses: list[float] = json.loads(line.removeprefix("losses "))
    return losses


@pytest.fixture(scope="module")
def losses_of_torch(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Train with torch's loader and torchrun: each rank takes its part of each global batch."""
    program = tmp_path_factory.mktemp("torch") / "plain.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import json, sys
            import torch
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel
            from torch.utils.data import DataLoader
            sys.path.insert(0, {str(EXAMPLES)!r})
            from ray_train import EPOCHS, GLOBAL_BATCH_SIZE, Photographs, loss_of, make_model

            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            rank, count = dist.get_rank(), dist.get_world_size()
            loader = DataLoader(Photographs(), GLOBAL_BATCH_SIZE, shuffle=True,
                                generator=torch.Generator().manual_seed(0))
            model = DistributedDataParallel(make_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            losses = []
            for _ in range(EPOCHS):
                for batch in loader:
                    images, labels = (part.chunk(count)[rank] for part in batch)
                    loss = loss_of(model, images, labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
            if rank == 0:
                print("losses", json.dumps(losses))
            dist.destroy_process_group()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(program)],
        capture_output=True, text=True, timeout=RUN_S_MAX,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def start_training(
    on_ray: RayPool, folder: Path, program: Path = EXAMPLES / "ray_train.py"
) -> subprocess.Popen[str]:
    on_ray.up("--min", "2", "--max", "2")
    return subprocess.Popen(
        [
            *(sys.executable, str(program), "--address", on_ray.address),
            *("--ranks", "2", "--storage", str(folder / "storage"), "--name", "run"),
        ],
        env={**on_ray.pool.environment, "PENSTOCK_POOL": on_ray.pool.endpoint},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(training: subprocess.Popen[str]) -> str:
    text, _ = training.communicate(timeout=RUN_S_MAX)
    assert training.returncode == 0, text[-5000:]
    return text


def test_ray_train_with_a_pool_has_the_losses_of_torch(
    on_ray: RayPool, losses_of_torch: list[float], tmp_path: Path
) -> None:
    losses = losses_in(finished(start_training(on_ray, tmp_path)))
    assert losses == losses_of_torch
    assert len(losses) == 32 and losses[-1] < losses[0]


def pids_of_ranks(runtime: Path) -> list[int]:
    """Return the processes of Ray Train's workers, titled by Ray, in the cluster of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            environment = path.with_name("environ").read_text(errors="replace").split("\0")
            is_ours = f"XDG_RUNTIME_DIR={runtime}" in environment
            if is_ours and path.read_text().startswith("ray::RayTrainWorker"):
                found.append(int(path.parent.name))
    return found


def test_losses_are_the_same_after_a_rank_was_killed(
    on_ray: RayPool, losses_of_torch: list[float], tmp_path: Path
) -> None:
    """Ray starts both ranks again, which resume from a checkpoint in the middle of an epoch."""
    program, step = tmp_path / "slow.py", "losses.append(loss.item())"
    text = (EXAMPLES / "ray_train.py").read_text(encoding="utf-8")
    assert text.count(step) == 1
    slow = f"{step}; __import__('time').sleep(0.2)"
    program.write_text(text.replace(step, slow), encoding="utf-8")
    training = start_training(on_ray, tmp_path, program)
    try:
        deadline = time.monotonic() + RUN_S_MAX
        while not any((tmp_path / "storage").glob("run/checkpoint_*/job.pt")):
            assert time.monotonic() < deadline and training.poll() is None
            time.sleep(0.1)
        assert [one["workers"] > 0 for one in on_ray.pool.status()["trainers"]] == [True, True]
        victim, other = pids_of_ranks(Path(on_ray.pool.environment["XDG_RUNTIME_DIR"]))
        os.kill(victim, signal.SIGKILL)
        text = finished(training)
    finally:
        training.kill()
    assert losses_in(text) == losses_of_torch
    assert not {victim, other} & {*pids_of_ranks(Path(on_ray.pool.environment["XDG_RUNTIME_DIR"]))}
