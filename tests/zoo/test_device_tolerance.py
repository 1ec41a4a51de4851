# SPDX-License-Identifier: Apache-2.0
"""Calls with different last bits on a device, where the user allows a difference: they move, are
measured, and return when the difference is larger.

The device is the simulated GPU of tests/simgpu.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
import torch.nn.functional as F
from device_process import on_simgpu, run_on_simgpu
from device_styles import BATCH, SAMPLES, Combination, Convolutions, Images, run
from offload_training import with_own_code
from pool_processes import pool_of

import penstock
from penstock.graph.plan import Plan

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"
STEPS = SAMPLES // BATCH


def curved(images: torch.Tensor) -> torch.Tensor:
    return torch.exp(images.float() * 0.004) * 2


def curved_twice(images: torch.Tensor) -> torch.Tensor:
    """A unit in the last place becomes several."""
    return torch.exp(torch.exp(images.float() * 0.004))


def floored(images: torch.Tensor) -> torch.Tensor:
    return torch.floor(torch.exp(images.float() * 0.004))


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """Penstock's warnings in the block."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("penstock").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("penstock").removeHandler(handler)


class Trained:
    """A training in steps, offloaded unless `way` is "torch"."""

    def __init__(self, prepare: Any, way: str, **options: Any) -> None:
        torch.manual_seed(3)
        self.model: Any = with_own_code(Convolutions(prepare)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        if way == "torch":
            self.loader: Any = torch.utils.data.DataLoader(Images(), BATCH, num_workers=2)
        else:
            self.loader = penstock.DataLoader(Images(), BATCH, num_workers=2)
            penstock.offload(self.model, self.loader, cut=way, **options)  # type: ignore[type-var]

    def step(self, batch: Any) -> float:
        images, labels = (tensor.to(DEVICE) for tensor in batch)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def epoch(self) -> list[float]:
        return [self.step(batch) for batch in self.loader]

    @property
    def plan(self) -> Plan:
        plan: Plan = self.loader.plan
        return plan

    def moved(self) -> set[str]:
        return {call.partition(" at ")[0] for call in self.plan.moved_calls}


@on_simgpu
def test_call_with_other_bits_stays_without_a_tolerance() -> None:
    with simgpu.other_bits("exp"):
        ours, theirs = Trained(curved, "maximal"), Trained(curved, "torch")
        assert ours.epoch() + ours.epoch() == theirs.epoch() + theirs.epoch()
    assert "float" in ours.moved() and "exp" not in ours.moved()
    kept = next(call for call in ours.plan.kept if call.operator.startswith("exp"))
    assert "has different last bits on simgpu:0 than on a CPU" in kept.reason
    assert kept.largest_difference is None
    assert [total.cut for total in ours.plan.totals] == ["none", "maximal", "chosen"]


@pytest.mark.parametrize("tolerance", [1, 2e-7])
@on_simgpu
def test_call_within_tolerance_moves_and_shows_its_difference(
    tolerance: float,
) -> None:
    with simgpu.other_bits("exp"), warnings() as said:
        ours = Trained(curved, "maximal", cut_tolerance=tolerance)
        theirs = Trained(curved, "torch")
        losses, expected = ours.epoch() + ours.epoch(), theirs.epoch() + theirs.epoch()
    assert losses == pytest.approx(expected, rel=1e-4) and losses != expected
    assert said == []
    assert {"float", "exp", "mul"} <= ours.moved()
    call = next(call for call in ours.plan.moved if call.operator.startswith("exp"))
    assert call.largest_difference is not None and 0 < call.largest_difference <= tolerance
    assert (
        "has different last bits on simgpu:0 than on a CPU, and cut_tolerance allows moving it"
        in call.reason
    )
    assert "the largest difference so far is " in call.reason
    chosen, exact = ours.plan.totals[2:]
    assert (chosen.cut, exact.cut) == ("chosen", "exact")
    behind = [one for one in ours.plan.moved if one.index >= call.index]
    assert [one.operator.partition(" at ")[0] for one in behind] == ["exp", "mul"]
    spared_s = sum(one.trainer_s for one in behind)
    assert exact.trainer_s == pytest.approx(chosen.trainer_s + spared_s)
    assert "without cut_tolerance" in str(ours.plan)


@on_simgpu
def test_tolerance_with_equal_bits_matches_torch() -> None:
    ours, theirs = Trained(curved, "maximal", cut_tolerance=1), Trained(curved, "torch")
    assert ours.epoch() + ours.epoch() == theirs.epoch() + theirs.epoch()
    assert "exp" in ours.moved()
    assert {call.largest_difference for call in ours.plan.moved} == {None, 0.0}


@on_simgpu
def test_call_beyond_the_tolerance_at_planning_stays() -> None:
    with simgpu.other_bits("exp"), warnings() as said:
        ours = Trained(curved_twice, "maximal", cut_tolerance=1)
        theirs = Trained(curved_twice, "torch")
        assert ours.epoch() + ours.epoch() == theirs.epoch() + theirs.epoch()
    assert said == [] and "float" in ours.moved() and "exp" not in ours.moved()
    reasons = [call.reason for call in ours.plan.kept if call.operator.startswith("exp")]
    assert any("cut_tolerance allows 1 unit in the last place" in reason for reason in reasons)


@pytest.mark.parametrize("verify_every", [1, 3])
@on_simgpu
def test_later_difference_beyond_tolerance_returns_calls(
    verify_every: int,
) -> None:
    """From then on the losses are the losses of the model as it is then, without penstock."""
    ours = Trained(curved_twice, "maximal", cut_tolerance=1, verify_every=verify_every)
    theirs = Trained(curved_twice, "torch")
    losses, expected = ours.epoch(), theirs.epoch()
    assert losses == expected and "exp" in ours.moved()
    with simgpu.other_bits("exp"), warnings() as said:
        for _ in range(2):
            for batch in ours.loader:
                before = {name: value.clone() for name, value in ours.model.state_dict().items()}
                is_back = bool(said)
                loss = ours.step(batch)
                if said:
                    if not is_back:
                        theirs.model.load_state_dict(before)
                    assert theirs.step(batch) == loss
    assert len(said) == 1
    assert "exp at test_device_tolerance.py" in said[0] and "the device's (simgpu:0) by " in said[0]
    assert "cut_tolerance allows 1 unit in the last place; it runs in the trainer" in said[0]
    assert "float" in ours.moved() and "exp" not in ours.moved()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value.cpu(), theirs.model.state_dict()[name].cpu()), name


@on_simgpu
def test_operator_that_amplifies_small_differences_stays() -> None:
    ours, theirs = Trained(floored, "maximal", cut_tolerance=1), Trained(floored, "torch")
    assert ours.epoch() + ours.epoch() == theirs.epoch() + theirs.epoch()
    assert "exp" in ours.moved() and "floor" not in ours.moved()


@on_simgpu
def test_auto_cut_respects_the_tolerance() -> None:
    with simgpu.other_bits("exp"), warnings() as said:
        ours, theirs = Trained(curved, "auto", cut_tolerance=4), Trained(curved, "torch")
        losses, expected = ours.epoch() + ours.epoch(), theirs.epoch() + theirs.epoch()
    assert losses == pytest.approx(expected, rel=1e-4)
    assert said == []
    differences = [call.largest_difference for call in ours.plan.moved]
    assert all(0 <= one <= 4 for one in differences if one is not None), ours.plan


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder of a pool with two workers, by which `run` finds it."""
    for opened in pool_of(tmp_path, monkeypatch):
        opened.start_worker(processes=2)
        yield f"{opened.endpoint} {opened.environment['XDG_RUNTIME_DIR']}"


def test_pool_workers_compute_within_the_tolerance(pool: str) -> None:
    name, differing = "image moved, model prepares", ("_upsample_bilinear2d_aa",)
    expected = run_on_simgpu(run, name, "torch", "simgpu", differing)
    served = Combination(place="pool")
    ours = run_on_simgpu(run, name, "maximal", "simgpu", differing, served, pool, cut_tolerance=4)
    assert "interpolate" in ours.moved[0], ours
    assert ours.losses == pytest.approx(expected.losses, rel=1e-3)
    assert ours.differences and all(0 < one <= 4 for one in ours.differences)


@pytest.mark.parametrize(
    ("name", "moved", "tolerance"),
    [
        ("image moved, model prepares", "interpolate", 4),
        ("step offloaded", "interpolate", 4),
        ("compiled model", "interpolate", 4),
        ("wave moved, model prepares", "stft", 1e-5),
    ],
)
def test_differing_operators_move_within_the_tolerance(
    name: str, moved: str, tolerance: float
) -> None:
    differing = ("_upsample_bilinear2d_aa", "_fft_r2c", "log")
    expected = run_on_simgpu(run, name, "torch", "simgpu", differing)
    exact = run_on_simgpu(run, name, "maximal", "simgpu", differing)
    ours = run_on_simgpu(run, name, "maximal", "simgpu", differing, cut_tolerance=tolerance)
    assert exact.losses == expected.losses and moved not in exact.moved[0]
    assert moved in ours.moved[0], ours
    assert ours.losses == pytest.approx(expected.losses, rel=1e-3)
    assert ours.differences and all(0 < one <= tolerance for one in ours.differences)
