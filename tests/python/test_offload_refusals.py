# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be cut, wholly or in part: training is unchanged, and the plan gives the
reason."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from cut_models import CASES, Case
from in_process_pool import InProcessPool
from offload_training import (
    ReadsBetweenWrites,
    TwoGraphs,
    batches_of,
    bits,
    eager_trace,
    fresh,
    train,
    warnings_of,
)
from torch import nn

from penstock.cut.offloading import offload
from penstock.tracking.loader_use import IDLE_BATCHES_MAX

pytestmark = pytest.mark.usefixtures("on_one_thread")


class Checkpointed(nn.Module):
    """Run by Dynamo, checkpointing over a BatchNorm differs from eager, so the frame must be
    eager's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.utils.checkpoint.checkpoint(self.body, x * 2.0, use_reentrant=False)
        return self.net(x)


class SwitchesInferenceMode(TwoGraphs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = x.abs().amax()
        return self.net(x * 2.0) * float(scale)


class WritesTheBatch(TwoGraphs):
    """The model overwrites its input; the batch is another one afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3.0
        x.mul_(0.5)
        return self.net(x + y)


class CountsInABuffer(TwoGraphs):
    """A buffer that forward writes to is state, although it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.net(x / (1.0 + self.seen))


class ReplacesABuffer(CountsInABuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen * 0.9 + 1.0
        return self.net(x.float() / (1.0 + self.seen))


class WritesAView(TwoGraphs):
    """In-place writes through a view of an intermediate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        y[:, :5] -= 1.0
        z = y.sin()
        y.view(-1)[::3].zero_()
        return self.net(y + z)


REFUSED = {
    "checkpoint": (Checkpointed, "higher-order"),
    "inference mode": (SwitchesInferenceMode, "inference_mode"),
}


def test_torch_dataloader_warning_names_the_import(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The good sentence was followed by "'DataLoader' object has no attribute '_show_plan'"."""
    model = nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)))
    assert offload(model, loader) is model
    (warning,) = warnings_of(caplog)
    assert warning.startswith("penstock: offload has no effect: the loader is torch.utils.data.")
    assert "`from penstock import DataLoader`" in warning
    assert not vars(model).keys() & {"forward", "_compiled_call_impl"}
    offload(model, InProcessPool([]), loader)
    assert len(warnings_of(caplog)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_model_trains_as_eager_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_model, reason = REFUSED[kind]
    case = Case(kind, make_model, CASES[5].make_batch, CASES[5].loss, False)
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(make_model), pool, cut="maximal")
    assert train(model, pool, case.loss) == eager_trace(case)
    assert pool.plan is not None and pool.plan.refused is not None and reason in pool.plan.refused
    assert len(warnings_of(caplog)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_model",
    [WritesTheBatch, CountsInABuffer, ReplacesABuffer, WritesAView, ReadsBetweenWrites],
)
def test_cut_model_with_in_place_writes_matches_eager(make_model: Callable[[], nn.Module]) -> None:
    case = Case("", make_model, CASES[5].make_batch, CASES[5].loss, True)
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(make_model), pool, cut="maximal", verify_every=2)
    assert train(model, pool, case.loss) == eager_trace(case)
    assert pool.plan is not None and pool.plan.refused is None


@pytest.mark.slow
def test_in_place_writes_to_a_clone_move_together(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("", ReadsBetweenWrites, CASES[5].make_batch, CASES[5].loss, True)
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut="maximal")
    train(model, pool, case.loss)
    assert pool.plan is not None
    moved = " ".join(call.operator for call in pool.plan.moved)
    assert "clone, add_, mul_" in moved and "sin" in moved and "cos" in moved
    assert not warnings_of(caplog)


@pytest.mark.slow
def test_calls_under_ambient_autocast_match_eager() -> None:
    case = CASES[5]
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut="maximal")
    reference = fresh(case.make_model)
    for use_autocast in (True, False, True, False):
        batch = pool.deliver(case.make_batch(0))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_autocast):
            torch.manual_seed(3)
            ours = model(batch[0])
            torch.manual_seed(3)
            assert bits(ours) == bits(reference(batch[0]))
    assert pool.plan is not None and pool.plan.moved


@pytest.mark.slow
def test_reason_names_in_place_write_to_the_batch() -> None:
    """The message was that the model was given no tensor of the batch."""
    pool = InProcessPool([])
    model = offload(fresh(TwoGraphs), pool, cut="maximal")
    for _ in range(20):
        batch = pool.deliver(torch.randn(10, 20))
        batch.clamp_(-1, 1)
        model(batch)
    assert pool.plan is not None and "had modified in place" in str(pool.plan.refused)


@pytest.mark.slow
def test_cut_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """There was no message that offload() had succeeded."""
    caplog.set_level(logging.INFO, "penstock")
    pool = InProcessPool([])
    model = offload(fresh(TwoGraphs), pool, cut="maximal")
    for _ in range(3):
        model(pool.deliver(torch.randn(10, 20)))
    told = [r.getMessage() for r in caplog.records if "run in the workers" in r.getMessage()]
    assert len(told) == 1
    assert re.match(
        r"penstock: \d+ of \d+ calls run in the workers, which saves the trainer about .* ms of "
        r"work per batch; the workers spend .* ms on it\. print\(loader\.plan\) shows which",
        told[0],
    )
    assert str(pool.plan).startswith(f"{len(pool.plan.moved)} of ")


@pytest.mark.slow
def test_plan_describes_usual_batch_instead_of_last_one() -> None:
    """With 1,797 samples in batches of 64 it reported that 0 of 8 calls run in the workers."""

    class Own(TwoGraphs):  # whose number of rows no other test has had captured
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x * 2.0)

    pool = InProcessPool([])
    model = offload(fresh(Own), pool, cut="maximal")
    for rows in (64, 64, 64, 5):
        model(pool.deliver(torch.randn(rows, 20)))
    assert pool.plan is not None and pool.plan.raw_bytes == 64 * 20 * 4
    for rows in (5, 5, 5):
        model(pool.deliver(torch.randn(rows, 20)))
    assert pool.plan.raw_bytes == 5 * 20 * 4


@pytest.mark.slow
def test_plan_of_ever_changing_forward_names_recompile_limit() -> None:
    class Counts(TwoGraphs):
        def __init__(self) -> None:
            super().__init__()
            self.name = "0"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.name = str(int(self.name) + 1)
            return self.net(x * float(len(self.name)))

    pool = InProcessPool([])
    model, reference = offload(fresh(Counts), pool, cut="maximal"), fresh(Counts)
    for _ in range(30):
        batch = pool.deliver(torch.randn(10, 20))
        assert bits(model(batch)) == bits(reference(batch.clone()))
    assert model.name == reference.name == "30"
    assert pool.plan is not None
    limit = torch._dynamo.config.recompile_limit
    assert f"{limit} times" in str(pool.plan.refused)
    assert "keeps changing" in str(pool.plan.refused)


def test_refusal_names_the_model_and_its_offload_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case("", SwitchesInferenceMode, CASES[5].make_batch, CASES[5].loss, False)
    model, pool = fresh(SwitchesInferenceMode), InProcessPool(batches_of(case))
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    offload(model, pool)
    train(model, pool, case.loss)
    (warning,) = warnings_of(caplog)
    assert f" of SwitchesInferenceMode, offloaded at {Path(__file__).name}:{line}, " in warning


def test_offloaded_model_replaced_by_copy_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = CASES[0]
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut="maximal")
    for batch in pool:
        model(batch[0])
    assert pool.prefixes
    twin = copy.deepcopy(model)
    for _ in range(3 * IDLE_BATCHES_MAX):
        twin(pool.deliver(case.make_batch(0))[0])
    (warning,) = warnings_of(caplog)
    assert f"for {type(model).__name__}, offloaded at {Path(__file__).name}:" in warning
    assert "call penstock.offload(copy, loader)" in warning
