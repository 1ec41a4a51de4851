# SPDX-License-Identifier: Apache-2.0
"""TorchScript modules that copy their input to a device themselves: cut on either side of the copy.

The device is the simulated GPU of tests/simgpu. The C++ library's are in tests/cpp/cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_process import on_simgpu
from device_styles import BATCH, Images
from torch import nn

import penstock

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"
EPOCHS = 4


class Mixed(nn.Module):
    """Prepares its input on the CPU, and continues on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(3, 1, 1))
        self.head = nn.Linear(3 * 20 * 20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.exp(x.float() / 255)
        x = x.to(self.head.weight.device)
        x = torch.flip((x - self.mean) * 2, [-1])
        return self.head(x.flatten(1))


class OnTheDevice(Mixed):
    """Only copies its input on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.device).float()
        x = torch.clamp(x * 0.5 - self.mean, 0.0, 100.0)
        return self.head(torch.log1p(x).flatten(1))


class OnlyCopies(Mixed):
    """No operation on the results of the copy can move."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.log1p(x.to(self.head.weight.device)).flatten(1))


def trained(make: Any, cut: str) -> tuple[list[float], Any]:
    torch.manual_seed(3)
    model: Any = torch.jit.script(make().to(DEVICE))
    if cut == "torch":
        loader: Any = torch.utils.data.DataLoader(Images(), BATCH, num_workers=2)
    else:
        loader = penstock.DataLoader(Images(), BATCH, num_workers=2)
        model = penstock.offload(model, loader, cut=cut, verify_every=7)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels.to(DEVICE))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, loader


def moved(loader: Any) -> set[str]:
    assert loader.plan is not None and loader.plan.refused is None, loader.plan
    return {call.operator.partition(" at ")[0] for call in loader.plan.moved}


@pytest.mark.parametrize(
    ("make", "moves"),
    [
        (Mixed, {"aten::exp", "aten::sub", "aten::flip"}),
        (OnTheDevice, {"aten::to", "aten::sub", "aten::clamp"}),
    ],
)
@on_simgpu
def test_cut_script_module_on_device_matches_uncut(make: Any, moves: set[str]) -> None:
    expected, _ = trained(make, "torch")
    losses, loader = trained(make, "maximal")
    assert losses == expected
    assert moves <= moved(loader)
    assert loader.stats().boundary_batches > 0


@on_simgpu
def test_calls_with_other_bits_on_the_device_stay() -> None:
    _, loader = trained(OnTheDevice, "maximal")
    kept = {call.operator.partition(" at ")[0]: call.reason for call in loader.plan.kept}
    assert "on a CPU" in kept["aten::log1p"]


@on_simgpu
def test_copy_without_movable_calls_stays() -> None:
    expected, _ = trained(OnlyCopies, "torch")
    losses, loader = trained(OnlyCopies, "maximal")
    assert losses == expected
    assert moved(loader) == set()
    assert loader.stats().boundary_batches == 0


@on_simgpu
def test_explain_reads_a_scripted_module_on_a_device() -> None:
    model = torch.jit.script(OnTheDevice().to(DEVICE))
    images = torch.stack([Images()[place][0] for place in range(BATCH)])
    plan = penstock.explain(model, images, cut="maximal")
    assert "aten::clamp" in {call.operator.partition(" at ")[0] for call in plan.moved}
    assert plan.copy_bytes_per_s is not None
