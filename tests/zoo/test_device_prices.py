# SPDX-License-Identifier: Apache-2.0
"""The time of calls on a device, by its events: in plans, in their words, and for the doctor.

The device is the simulated GPU of tests/simgpu, whose kernels take as long as the CPU's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
from device_process import on_simgpu, run_on_new_simgpu
from device_styles import BATCH, Convolutions, Images
from offload_training import with_own_code

import penstock
from penstock.graph.plan import Plan

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"


def many_cheap_calls(images: torch.Tensor) -> torch.Tensor:
    x = images.float()
    for _ in range(6):
        x = x * 2 - x
    return torch.flip(x, [-1])


def planned(prepare: Any, cut: Any) -> Plan:
    loader = penstock.DataLoader(Images(), BATCH, num_workers=2)
    model = with_own_code(Convolutions(prepare)).to(DEVICE)
    penstock.offload(model, loader, cut=cut)
    for images, _ in loader:
        model(images.to(DEVICE))
    plan: Plan | None = loader.plan
    assert plan is not None and plan.refused is None, plan
    return plan


@on_simgpu
def test_device_calls_have_device_times_and_name() -> None:
    plan = planned(many_cheap_calls, cut="none")
    calls = {call.operator.partition(" at ")[0]: call for call in plan.kept}
    for name in ("float", "mul", "sub", "flip"):
        assert calls[name].device == DEVICE, calls[name]
        assert calls[name].trainer_s > 0, calls[name]
        assert calls[name].worker_s > 0, calls[name]
    assert plan.copy_bytes_per_s is not None and plan.copy_bytes_per_s > 0
    text = " ".join(plan.table().split())
    assert f"Trainer ms of calls on {DEVICE} are device times, measured by events" in text
    assert "Copies from pinned memory to the device ran at" in text


@on_simgpu
def test_device_timing_does_not_advance_the_generator() -> None:
    def noisy(images: torch.Tensor) -> torch.Tensor:
        x = images.float()
        return x + torch.rand_like(x) * 0.5

    outcomes = []
    for cut in ("torch", "none", "maximal"):
        torch.manual_seed(5)
        model: Any = with_own_code(Convolutions(noisy)).to(DEVICE)
        if cut == "torch":
            loader: Any = torch.utils.data.DataLoader(Images(), BATCH, num_workers=2)
        else:
            loader = penstock.DataLoader(Images(), BATCH, num_workers=2)
            model = penstock.offload(model, loader, cut=cut)  # type: ignore[arg-type]
        sums = [model(images.to(DEVICE)).sum().item() for images, _ in loader]
        outcomes.append((sums, simgpu.get_rng_state(0).tolist()))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def planned_without_room() -> tuple[float, str | None, float | None]:
    with simgpu.memory_limit(1 << 21):  # enough for the training, but not for the timed copy
        plan = planned(many_cheap_calls, cut="none")
    calls = {call.operator.partition(" at ")[0]: call for call in plan.kept}
    return calls["mul"].trainer_s, calls["mul"].device, plan.copy_bytes_per_s


def test_copy_rate_is_unknown_without_memory_for_timed_copy() -> None:
    trainer_s, device, copy_bytes_per_s = run_on_new_simgpu(planned_without_room)
    assert trainer_s > 0 and device == DEVICE
    assert copy_bytes_per_s is None


@on_simgpu
def test_explain_shows_device_times() -> None:
    model = Convolutions(many_cheap_calls).to(DEVICE)
    images = torch.stack([Images()[place][0] for place in range(BATCH)])
    plan = penstock.explain(model, images.to(DEVICE))
    assert {call.device for call in (*plan.moved, *plan.kept) if call.trainer_s} == {DEVICE}
    assert f"on {DEVICE}" in plan.table()
    assert f'"{DEVICE}"' in plan.to_json()


PROGRAM = """
import sys
sys.path[:0] = {paths}
import torch
import simgpu
simgpu.register()
from device_process import _add_bits
_add_bits(simgpu.NAME)
torch.set_num_threads(1)
import torch.nn.functional as F
from device_styles import Images
from penstock import DataLoader

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3 * 20 * 20, 4)

    def forward(self, x):
        x = x.float()
        for _ in range(400):
            x = torch.flip(x, [-1])
        return self.head(x.flatten(1))

model = Slow().to("{device}")
for _ in range(50):
    for images, labels in DataLoader(Images(), 4, num_workers=1, persistent_workers=True):
        F.cross_entropy(model(images.to("{device}")), labels.to("{device}")).backward()
"""


def test_doctor_lists_device_calls(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    path.write_text(PROGRAM.format(paths=paths, device=DEVICE))
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--trials", "0", "--steps", "8", str(path)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "call that workers could run" in done.stdout, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("flip"))
    assert DEVICE in line
