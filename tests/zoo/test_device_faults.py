# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between a loader's batches and a device: full and lost devices, late copies,
writes to either end of a copy, other devices than the last.

The device is the simulated GPU of tests/simgpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simgpu
import torch
import torch.nn.functional as F
from device_process import on_simgpu
from device_styles import BATCH, SAMPLES, Convolutions, Images, prepared_image
from torch import nn

import penstock

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def losses(step: Step, way: str, *, epochs: int = 2, **options: Any) -> list[float]:
    """Of a training in which `step` brings the batch to the device."""
    torch.manual_seed(3)
    torch._dynamo.reset()  # which remembers the other trainings of this process
    model = Convolutions().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if way == "torch":
        loader: Any = torch.utils.data.DataLoader(Images(), batch_size=BATCH, num_workers=2)
    else:
        loader = penstock.DataLoader(Images(), batch_size=BATCH, num_workers=2, **options)
        penstock.offload(model, loader, cut=way)  # type: ignore[arg-type]
    found = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = step(model, images, labels)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert len(found) == epochs * SAMPLES // BATCH
    return found


def moved(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    images = images.to(DEVICE, non_blocking=True).float() * 0.01
    return F.cross_entropy(model(images), labels.to(DEVICE, non_blocking=True))


def prepared(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(prepared_image(images).to(DEVICE)), labels.to(DEVICE))


def written_at_once(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The host's memory is written to as soon as torch's copy would have read it."""
    on_device = images.to(DEVICE)
    images.zero_()
    return F.cross_entropy(model(on_device.float() * 0.01), labels.to(DEVICE))


def written_on_device(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first = images.to(DEVICE)
    first.fill_(7)
    second = images.to(DEVICE)
    return F.cross_entropy(model((first + second).float() * 0.01), labels.to(DEVICE))


def written_before(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    images[:, 0] = 3
    return F.cross_entropy(model(images.to(DEVICE).float() * 0.01), labels.to(DEVICE))


@pytest.mark.parametrize("cut", ["auto", "maximal", "none"])
@pytest.mark.parametrize(
    "step", [moved, prepared, written_at_once, written_on_device, written_before]
)
@on_simgpu
def test_a_program_that_writes_to_either_end_of_a_copy_trains_as_with_torch(
    step: Step, cut: str
) -> None:
    simgpu.set_copy_delay(0.01)
    try:
        assert losses(step, cut) == losses(step, "torch")
    finally:
        simgpu.set_copy_delay(0.002)


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@on_simgpu
def test_copies_that_nobody_waits_for_change_nothing(cut: str) -> None:
    with simgpu.held_copies():
        ours = losses(moved, cut)
    assert ours == losses(moved, "torch")


@on_simgpu
def test_what_a_program_copies_is_copied_ahead_once() -> None:
    simgpu.reset_counts()
    losses(moved, "torch")
    expected = simgpu.counts()
    simgpu.reset_counts()
    losses(moved, "auto")
    ours = simgpu.counts()
    assert ours.late_copies > SAMPLES // BATCH  # the thread that copies waits for none
    # A batch that came before the program's ways were known, and what planning tries.
    assert ours.bytes_in < 1.5 * expected.bytes_in


@on_simgpu
def test_a_device_without_room_for_copies_ahead_still_trains() -> None:
    expected = losses(moved, "torch")
    simgpu.empty_cache()
    # Room for the model and one batch, not for those that come meanwhile.
    with simgpu.memory_limit(simgpu.memory_allocated() + (1 << 20)):
        assert losses(moved, "auto", prefetch_factor=4) == expected


@on_simgpu
def test_a_device_that_is_lost_is_the_programs_own_error() -> None:
    seen = 0

    def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen < 12:
            return moved(model, images, labels)
        with simgpu.lost_device(), pytest.raises(RuntimeError):
            moved(model, images, labels)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        losses(step, "auto")


@on_simgpu
def test_a_program_may_go_to_another_device_than_before() -> None:
    def other(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = images.to("simgpu:1")
        assert there.device == torch.device("simgpu:1")
        return moved(model, there.cpu() + images, labels)

    for cut in ("auto", "maximal"):
        assert losses(other, cut) == losses(other, "torch")


@on_simgpu
def test_batches_that_are_kept_over_epochs_keep_their_values() -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keeping(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = images.to(DEVICE)
        kept.append((images, there))
        return F.cross_entropy(model(there.float() * 0.01), labels.to(DEVICE))

    ours = losses(keeping, "maximal")
    theirs = kept.copy()
    kept.clear()
    assert ours == losses(keeping, "torch")
    for (image, there), (expected, _) in zip(theirs, kept, strict=True):
        assert torch.equal(image, expected) and torch.equal(there.cpu(), expected)


class Dropping(Convolutions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x.float() * 0.01, 0.5))


@on_simgpu
def test_numbers_drawn_on_the_device_are_those_of_torch() -> None:
    """Where a graph is compared with the forward, the device's generator is put back."""

    def draws(way: str) -> list[float]:
        torch.manual_seed(5)
        torch._dynamo.reset()
        model = Dropping().to(DEVICE)
        if way == "torch":
            loader: Any = torch.utils.data.DataLoader(Images(), batch_size=BATCH, num_workers=1)
        else:
            loader = penstock.DataLoader(Images(), batch_size=BATCH, num_workers=1)
            penstock.offload(model, loader, cut=way, verify_every=3)  # type: ignore[arg-type]
        return [
            F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).item()
            for _ in range(2)
            for images, labels in loader
        ]

    expected = draws("torch")
    assert draws("maximal") == expected and draws("auto") == expected
