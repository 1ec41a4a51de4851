# SPDX-License-Identifier: Apache-2.0
"""To a program that trains on a device, a pool sends only the parts of a batch that the program
reads.

The device is the simulated GPU of tests/simgpu, in a separate process; controller and workers are
processes without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import simgpu
import torch
import torch.nn.functional as F
from device_process import run_on_simgpu
from offload_training import with_own_code
from pool_datasets import CODE, Pictures
from pool_processes import PoolProcesses, pool_of
from torch import nn

import penstock
from penstock import DataLoader, Pool

pytestmark = [pytest.mark.slow, pytest.mark.long]
DEVICE = "simgpu:0"
BATCH = 8
BATCHES = 30  # of an epoch
IMAGE_BYTES = BATCH * 3 * 64 * 64
MASK_BYTES = BATCH * 8 * 64 * 64
Step = Callable[[Any, dict[str, Any], int], torch.Tensor]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Shrinking(nn.Module):
    """Reads the pictures through a small part without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        small = F.adaptive_avg_pool2d(images.float() / 255, 8)
        out: torch.Tensor = self.head(small.flatten(1))
        return out


class Training(NamedTuple):
    losses: list[float]
    bytes_in: int  # to the device in the last epoch, when planning is over
    withheld_bytes: int = 0
    batch_bytes: int = 0
    recalled_batches: int = 0


def plain_step(model: Any, batch: dict[str, Any], number: int) -> torch.Tensor:
    images, labels = batch["image"].to(DEVICE), batch["class"].to(DEVICE)
    return F.cross_entropy(model(images), labels)


def reading_now_and_then(model: Any, batch: dict[str, Any], number: int) -> torch.Tensor:
    loss = plain_step(model, batch, number)
    if number % 35 == 34:
        image = batch["image"].to(DEVICE)
        assert image.device == torch.device(DEVICE)
        return loss + image.float().var() * 1e-3
    return loss


def written(model: Any, batch: dict[str, Any], number: int) -> torch.Tensor:
    loss = plain_step(model, batch, number)
    if number % 35 == 34:
        batch["image"].clamp_(0, 100)
        return loss + plain_step(model, batch, number)
    return loss


def on_a_side_stream(model: Any, batch: dict[str, Any], number: int) -> torch.Tensor:
    """As prefetchers do, which report the reader of a batch's memory to torch."""
    for tensor in batch.values():
        if tensor.device.type == "simgpu":
            tensor.record_stream(simgpu.current_stream())
    return reading_now_and_then(model, batch, number)


def train(
    step: Step, environment: dict[str, str], backend: str | None = None, **options: Any
) -> Training:
    """For the process that has the device. Without `pool` it is the plain program; with `backend`
    the model is compiled."""
    os.environ.update(environment)
    torch.manual_seed(0)
    model: Any = with_own_code(Shrinking()).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if backend is not None:
        model = torch.compile(model, backend=backend)
    loader: Any = DataLoader(
        Pictures(BATCH * BATCHES), batch_size=BATCH, shuffle=True, seeding="batch", **options
    )
    if "pool" in options:
        model = penstock.offload(model, loader, cut="maximal")
    losses = []
    for _ in range(2):
        simgpu.reset_counts()
        for batch in loader:
            loss = step(model, batch, len(losses))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    stats = loader.stats()
    return Training(
        losses,
        simgpu.counts().bytes_in,
        stats.withheld_bytes,
        stats.batch_bytes,
        stats.recalled_batches,
    )


def trained_by(
    pool: PoolProcesses, step: Step, backend: str | None = None, **options: Any
) -> tuple[Training, Training]:
    """The plain program, and the one that the pool serves."""
    environment = {"XDG_RUNTIME_DIR": pool.environment["XDG_RUNTIME_DIR"]}
    options = {"pool": Pool(pool.endpoint, code_paths=[CODE]), "timeout": 60, **options}
    plain = run_on_simgpu(train, step, environment, backend)
    offloaded = run_on_simgpu(train, step, environment, backend, **options)
    return plain, offloaded


@pytest.mark.parametrize("device", [DEVICE, None], ids=["device=", "moved by the loop"])
def test_unread_leaves_are_not_sent_or_copied_to_device(
    pool: PoolProcesses, device: str | None
) -> None:
    pool.start_worker()
    plain, offloaded = trained_by(pool, plain_step, device=device)
    assert offloaded.losses == plain.losses
    assert offloaded.recalled_batches == 0
    assert offloaded.withheld_bytes > BATCHES * (IMAGE_BYTES + MASK_BYTES)
    assert offloaded.batch_bytes < offloaded.withheld_bytes
    whole = BATCHES * (IMAGE_BYTES + (0 if device is None else MASK_BYTES))
    assert offloaded.bytes_in < whole / 2


@pytest.mark.parametrize("device", [DEVICE, None], ids=["device=", "moved by the loop"])
@pytest.mark.parametrize("step", [reading_now_and_then, written, on_a_side_stream])
def test_rarely_read_leaf_is_right_on_the_device(
    pool: PoolProcesses, step: Step, device: str | None
) -> None:
    pool.start_worker()
    plain, offloaded = trained_by(pool, step, device=device)
    assert offloaded.losses == plain.losses
    assert offloaded.recalled_batches in (1, 2)  # the first may be in the watched part
    assert offloaded.withheld_bytes > 0


@pytest.mark.parametrize("device", [DEVICE, None], ids=["device=", "moved by the loop"])
def test_unread_leaves_of_compiled_model_are_not_sent(
    pool: PoolProcesses, device: str | None
) -> None:
    pool.start_worker()
    plain, offloaded = trained_by(pool, reading_now_and_then, "aot_eager", device=device)
    assert offloaded.losses == plain.losses
    assert offloaded.recalled_batches == 1
    assert offloaded.withheld_bytes > BATCHES * (IMAGE_BYTES + MASK_BYTES)
