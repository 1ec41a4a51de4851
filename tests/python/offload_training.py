# SPDX-License-Identifier: Apache-2.0
"""Trains the cut's models, and returns all state that training leaves behind, as bytes."""

from __future__ import annotations

import hashlib
import itertools
import random
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from cut_models import Case
from torch import nn

STEPS = 6
_Model = TypeVar("_Model", bound=nn.Module)
_numbers = itertools.count()


def train(
    model: nn.Module, batches: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor]
) -> list[bytes]:
    """Train six steps of SGD with momentum; return every tensor that training leaves behind, as
    bytes, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    trace: list[bytes] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        trace.append(bits(loss))
        trace += [bits(p.grad) for p in model.parameters() if p.grad is not None]
        trace += [bits(value) for value in model.state_dict().values()]
        trace += [bits(value) for value in model.buffers()]  # also the unsaved ones
        trace += generator_states()
    return trace


def generator_states() -> list[bytes]:
    """Return the next draws of torch, Python and NumPy."""
    others = repr((random.getstate(), np.random.get_state(legacy=False)))
    return [bits(torch.get_rng_state()), hashlib.sha256(others.encode()).digest()]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("penstock") and record.levelname == "WARNING"
    ]


def fresh(make_model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make_model()


def with_own_code(model: _Model) -> _Model:
    """Give the model a class whose forward has a separate code object, as in a separate program.

    For the code of a forward, Dynamo records how often it was compiled, up to
    `torch._dynamo.config.recompile_limit` for all models of a class, and the sizes of its
    arguments. Tests that share a class would depend on earlier tests in their process.
    """
    kind: Any = type(model)
    shared = kind.forward
    own = types.FunctionType(
        shared.__code__.replace(co_name=f"forward_{next(_numbers)}"),  # sizes are recorded by name
        shared.__globals__,
        shared.__name__,
        shared.__defaults__,
        shared.__closure__,
    )
    own.__kwdefaults__ = shared.__kwdefaults__
    own.__annotations__ = shared.__annotations__
    members = {"forward": own, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), members)
    return model


def batches_of(case: Case) -> list[Any]:
    return [case.make_batch(k) for k in range(STEPS)]


def eager_trace(case: Case) -> list[bytes]:
    return train(fresh(case.make_model), batches_of(case), case.loss)


class TwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        torch._dynamo.graph_break()
        return self.net(x)


class ReadsBetweenWrites(TwoGraphs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        before = y.cos()
        y.add_(1.0)
        between = y.sin()
        y.mul_(before)
        return self.net(y + between)
