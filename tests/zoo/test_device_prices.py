# SPDX-License-Identifier: Apache-2.0
"""What calls on a device take there, by its events: in plans, in their words, and for the doctor.

The device is the simulated GPU of tests/simgpu, whose kernels take what the CPU's do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
from device_process import on_simgpu
from device_styles import BATCH, Convolutions, Images

import penstock
from penstock.graph.plan import Plan

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"


def dear_and_cheap(images: torch.Tensor) -> torch.Tensor:
    x = images.float()
    for _ in range(6):
        x = x * 2 - x
    return torch.flip(x, [-1])


def planned(prepare: Any, **options: Any) -> Plan:
    with simgpu.memory_limit(1 << 22):  # enough to train, not for the copies that are timed
        plan = planned(prepare, cut="none")
    calls = {call.operator.partition(" at ")[0]: call for call in plan.kept}
    assert calls["mul"].trainer_s > 0 and calls["mul"].device == DEVICE
    assert plan.copy_bytes_per_s is None


@on_simgpu
def test_explain_has_the_devices_times() -> None:
    model = Convolutions(dear_and_cheap).to(DEVICE)
    images = torch.stack([Images()[place][0] for place in range(BATCH)])
    plan = penstock.explain(model, images.to(DEVICE))
    assert {call.device for call in (*plan.moved, *plan.kept) if call.trainer_s} == {DEVICE}
    assert f"on {DEVICE}" in str(plan)
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


def test_the_doctor_names_the_calls_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    paths = [one for one in sys.path if "tests" in one]
    path.write_text(PROGRAM.format(paths=paths, device=DEVICE))
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--trials", "0", "--steps", "8", str(path)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "call that workers could make" in done.stdout, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("flip"))
    assert DEVICE in line
