# SPDX-License-Identifier: Apache-2.0
"""User-defined operators move when the user declares them, and a wrong declaration is detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cut_models import CASES, Case, rows
from in_process_pool import InProcessPool
from offload_training import batches_of, bits, eager_trace, fresh, train, warnings_of
from test_offload_workers import Batches
from torch import nn

import penstock
from penstock.cut.offloading import offload

pytestmark = [pytest.mark.usefixtures("on_one_thread"), pytest.mark.slow]

calls = 0


@penstock.stateless
@torch.library.custom_op("penstock_tests::companded", mutates_args=())
def companded(wave: torch.Tensor, mu: float) -> torch.Tensor:
    return wave.sign() * torch.log1p(mu * wave.abs())


@companded.register_fake
def _(wave: torch.Tensor, mu: float) -> torch.Tensor:
    return torch.empty_like(wave)


@torch.library.custom_op("penstock_tests::unknown", mutates_args=())
def unknown(wave: torch.Tensor) -> torch.Tensor:
    return wave * 3.0


@unknown.register_fake
def _(wave: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(wave)


@penstock.stateless  # it is not
@torch.library.custom_op("penstock_tests::counted", mutates_args=())
def counted(wave: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return wave * (1.0 if calls < 20 else calls)


@counted.register_fake
def _(wave: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(wave)


class Companding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(unknown(companded(x * 2.0, 255.0).cos()))


class Counting(Companding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(counted(x * 2.0).cos())


CASE = Case("", Companding, rows, CASES[5].loss, True)


def moved(plan: Any) -> list[str]:
    return [call.operator.partition(" at ")[0] for call in plan.moved]


def test_operator_declared_stateless_moves() -> None:
    pool = InProcessPool(batches_of(CASE))
    model = offload(fresh(Companding), pool, cut="maximal", verify_every=2)
    assert train(model, pool, CASE.loss) == eager_trace(CASE)
    assert pool.plan is not None
    assert moved(pool.plan) == ["mul", "companded", "cos"]
    reasons = {call.operator.partition(" at ")[0]: call.reason for call in pool.plan.kept}
    assert "declare it with penstock.stateless" in reasons["unknown"]
    assert pool.shipped_count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_run_declared_operators(method: str) -> None:
    """A spawned worker imports this module to read the dataset's class."""
    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        Declared(CASE),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    model = offload(fresh(Companding), loader, cut="maximal", verify_every=3)
    reference = fresh(Companding)
    batches = torch.utils.data.DataLoader(
        Declared(CASE), batch_size=None, num_workers=1, persistent_workers=True
    )
    for _ in range(2):
        is_same = train(model, loader, CASE.loss) == train(reference, batches, CASE.loss)
        assert is_same
    assert loader.plan is not None and "cos" in moved(loader.plan)
    assert loader.stats().boundary_batches >= 10


class Declared(Batches):
    """A class of this module."""


def test_wrongly_declared_operator_returns_to_the_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operators that read its result return first, then the operator itself."""
    pool = InProcessPool([])
    model = offload(fresh(Counting), pool, cut="maximal", verify_every=1)
    for _ in range(40):
        batch = pool.deliver(torch.randn(10, 20))
        model(batch)
        if warnings_of(caplog):
            break
    [warning] = warnings_of(caplog)
    assert "result of cos at test_stateless.py" in warning
    for _ in range(5):
        model(pool.deliver(torch.randn(10, 20)))
    before = calls
    model(pool.deliver(torch.randn(10, 20)))
    assert calls > before  # once for the model, and for each comparison, which every call has here
    assert pool.plan is not None and moved(pool.plan) == ["mul"]
    reasons = {call.operator.partition(" at ")[0]: call.reason for call in pool.plan.kept}
    assert "returns other bits in a worker" in reasons["counted"]


def test_stateless_rejects_unsuitable_operators() -> None:
    with pytest.raises(ValueError, match=r"got aten::add_, which writes to its arguments"):
        penstock.stateless(torch.ops.aten.add_.Tensor)
    with pytest.raises(ValueError, match=r"got aten::view, which returns memory that belongs"):
        penstock.stateless(torch.ops.aten.view.default)
    with pytest.raises(ValueError, match=r"got aten::randn_like, which draws random numbers"):
        penstock.stateless(torch.ops.aten.randn_like.default)
    with pytest.raises(TypeError, match="stateless needs an operator, got a function"):
        penstock.stateless(lambda x: x)
    assert bits(companded(torch.ones(2), 1.0)) == bits(torch.log1p(torch.ones(2)))
