# SPDX-License-Identifier: Apache-2.0
"""Programs with which a cut was once wrong, or still is, each as small as possible.

A test that is expected to fail is a known fault; passing is then an error, so that a fix has to
remove the mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cut_models import Case, first_argument, rows
from in_process_pool import InProcessPool
from offload_training import batches_of, bits, eager_trace, fresh, train
from torch import nn
from zoo_control_flow import Rows
from zoo_features import Standardizes

from penstock.cut.offloading import offload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_thread")]

FIRST_WRITE = 4  # by then the first batch that a worker made has been compared


class Counting(Standardizes):
    """Counts its steps, so that a loss can do something late."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0


class ReadsNumPy(Counting):
    """Running statistics kept in NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = np.ones(20, dtype=np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * torch.from_numpy(self.statistics))


def write_buffer_data(model: Any, x: torch.Tensor) -> None:
    model.mean.data.add_(0.1)


def write_buffer_through_numpy(model: Any, x: torch.Tensor) -> None:
    model.mean.numpy()[:] += 0.1


def write_statistics(model: Any, x: torch.Tensor) -> None:
    model.statistics[:] += 0.1


def write_batch_data(model: Any, x: torch.Tensor) -> None:
    x.data.mul_(2.0)


def replace_batch_data(model: Any, x: torch.Tensor) -> None:
    x.data = x * 2.0


def write_batch_through_numpy(model: Any, x: torch.Tensor) -> None:
    x.numpy()[:] *= 2.0


def write_batch_through_dlpack(model: Any, x: torch.Tensor) -> None:
    torch.from_dlpack(x).mul_(2.0)


unseen = pytest.mark.xfail(
    reason="such writes leave the version and the address of a tensor as they were",
    raises=AssertionError,
    strict=True,
)


@pytest.mark.parametrize(
    ("make_model", "write"),
    [
        (Counting, write_buffer_data),
        (Counting, write_buffer_through_numpy),
        (ReadsNumPy, write_statistics),
        pytest.param(Counting, write_batch_data, marks=unseen),
        (Counting, replace_batch_data),
        pytest.param(Counting, write_batch_through_numpy, marks=unseen),
        pytest.param(Counting, write_batch_through_dlpack, marks=unseen),
    ],
    ids=lambda value: value.__name__,
)
def test_writes_bypassing_version_counter_match_eager(
    make_model: Callable[[], nn.Module], write: Callable[[Any, torch.Tensor], None]
) -> None:
    """Training continued with features of the old values, without any message."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        model.step += 1
        if model.step >= FIRST_WRITE:
            write(model, batch[0])
        return first_argument(model, batch)

    case = Case("", make_model, rows, loss, True)
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(make_model), pool, cut="maximal")
    assert train(model, pool, loss) == eager_trace(case)


def printing(module: nn.Module, inputs: Any, result: Any) -> None:
    print(end="")


def checking(module: nn.Module, inputs: Any, result: torch.Tensor) -> None:
    if result.isnan().any():
        raise ValueError("not a number")


def counting(module: nn.Module, inputs: Any, result: Any) -> None:
    module.calls.append(1)


@pytest.mark.parametrize("hook", [printing, checking, counting])
def test_hooks_on_the_model_may_run_any_python(hook: Callable[..., None]) -> None:
    """Training ended with an error from Dynamo, in the first step or in the ninth."""
    pool = InProcessPool([])
    model, reference = offload(fresh(Rows), pool, cut="maximal"), fresh(Rows)
    for each in (model, reference):
        each.calls = []  # type: ignore[assignment]
        each.register_forward_hook(hook)
    for k in range(12):
        x = pool.deliver(rows(k)[0])
        assert bits(model(x)) == bits(reference(x))
    assert len(model.calls) == len(reference.calls)


def test_root_module_of_torch_nn_gets_a_plan() -> None:
    """`loader.plan` stayed None for good, and no warning was logged."""
    pool = InProcessPool([])
    model = offload(nn.Sequential(nn.Hardtanh(), nn.Linear(20, 2)), pool, cut="maximal")
    for k in range(20):
        model(pool.deliver(rows(k)[0]))
    assert pool.plan is not None
