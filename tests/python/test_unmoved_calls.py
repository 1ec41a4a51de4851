# SPDX-License-Identifier: Apache-2.0
"""A model without movable operations runs as if it had not been offloaded, until one can move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process_pool import InProcessPool
from offload_training import bits, fresh
from torch import nn

from penstock import detach, offload
from penstock.cut.unmoved_calls import EXAMINED_EVERY, UNMOVED_CALLS_MIN, UnmovedCalls


class Counted(nn.Module):
    """Counts the calls in which Python itself runs its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.own_calls: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.own_calls.append(self.training)
        return self.net(torch.log1p(x.abs()))


class Scaled(Counted):
    """None of its operations can move in training; in evaluation, some can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.own_calls.append(self.training)
        return self.net(x) if self.training else self.net(torch.log1p(x.abs()))


def losses(model: nn.Module, deliver: Any, count: int) -> list[bytes]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(3)
    trace = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(deliver(torch.randn(3, 4, generator=draw))).square().sum()
        loss.backward()
        optimizer.step()
        trace += [bits(loss), *(bits(p) for p in model.parameters())]
    return trace


def test_calls_with_nothing_to_move_are_rarely_examined() -> None:
    pool = InProcessPool([])
    count = 10 * EXAMINED_EVERY
    expected = losses(fresh(Counted), lambda batch: batch, count)
    model = offload(fresh(Counted), pool, cut="none")
    assert losses(model, pool.deliver, count) == expected
    looked_at = count - len(model.own_calls)
    assert UNMOVED_CALLS_MIN < looked_at < UNMOVED_CALLS_MIN + count // EXAMINED_EVERY
    assert pool.plan is not None
    assert not pool.plan.moved
    assert detach(model).own_calls


@pytest.mark.parametrize("options", [{"cut": "maximal"}, {"cut": "none", "allow_random": True}])
def test_moving_or_drawing_calls_are_always_examined(options: Any) -> None:
    pool = InProcessPool([])
    model = offload(fresh(Counted), pool, **options)
    losses(model, pool.deliver, 4 * EXAMINED_EVERY)
    # The first call is run by Python, in addition to the graph that it is compared with.
    assert len(model.own_calls) == (0 if "allow_random" in options else 1)


def test_other_mode_is_examined_from_its_first_call() -> None:
    pool = InProcessPool([])
    model = offload(fresh(Scaled), pool, cut="maximal")
    losses(model, pool.deliver, UNMOVED_CALLS_MIN + EXAMINED_EVERY // 2)
    assert model.own_calls
    own_count = len(model.own_calls)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(pool.deliver(torch.ones(3, 4)))
    own_count += 1  # the first call in a mode, which is compared
    assert len(model.own_calls) == own_count
    assert [call.operator for call in pool.plan.moved]
    model.train()
    losses(model, pool.deliver, 1)
    assert len(model.own_calls) == own_count + 1


def test_hook_added_to_unexamined_model_fires() -> None:
    pool = InProcessPool([])
    model = offload(fresh(Counted), pool, cut="none")
    losses(model, pool.deliver, 3 * EXAMINED_EVERY)
    seen = []
    model.net.register_forward_hook(lambda *_: seen.append(1))
    losses(model, pool.deliver, 3 * EXAMINED_EVERY)
    assert len(seen) == 3 * EXAMINED_EVERY


def test_skipped_calls_add_weight_to_examined_call() -> None:
    still = UnmovedCalls(None)
    for _ in range(UNMOVED_CALLS_MIN):
        assert not still.may_skip()
        still.note_call(is_unmoved=True)
    assert [still.may_skip() for _ in range(EXAMINED_EVERY)].count(True) == EXAMINED_EVERY - 1
    assert still.weight == EXAMINED_EVERY
    still.note_call(is_unmoved=False)
    assert still.weight == 1
    assert not still.may_skip()
