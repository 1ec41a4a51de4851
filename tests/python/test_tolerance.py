# SPDX-License-Identifier: Apache-2.0
"""How far results are from a device's: the measure, and the option that allows a difference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import penstock
from penstock.graph.plan import Plan, PlannedCall
from penstock.graph.tolerance import Tolerance, with_differences

ULPS = Tolerance(1, "ulp")
RELATIVE = Tolerance(1e-5, "relative")


@pytest.mark.parametrize("value", [True, 0, -1, 0.0, 1.0, 2.5, -1e-5, math.nan, math.inf, "1", [1]])
def test_invalid_tolerance_is_rejected(value: Any) -> None:
    loader = penstock.DataLoader(TensorDataset(torch.ones(2)), num_workers=1)
    with pytest.raises((ValueError, TypeError), match="cut_tolerance must be an integer >= 1"):
        penstock.offload(torch.nn.Flatten(), loader, cut_tolerance=value)
    with pytest.raises((ValueError, TypeError), match="cut_tolerance must be an integer >= 1"):
        penstock.explain(torch.nn.Flatten(), torch.ones(2, 2), cut_tolerance=value)


def test_tolerance_is_ulps_if_int_and_relative_if_float() -> None:
    assert Tolerance.of(None) is None
    assert Tolerance.of(4) == Tolerance(4, "ulp")
    assert Tolerance.of(1e-5) == RELATIVE
    assert str(Tolerance(4, "ulp")) == "4 units in the last place"
    assert str(RELATIVE) == "1e-05 of the largest value"


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_ulp_difference_counts_representable_steps(dtype: torch.dtype) -> None:
    real = torch.empty(0, dtype=dtype).real.dtype
    own = torch.tensor([1.0, -2.0, 0.0, 1e-3], dtype=real)
    made = own
    for _ in range(3):
        made = torch.nextafter(made, torch.full_like(made, math.inf))
    assert ULPS.difference(made.to(dtype), own.to(dtype)) == 3


def test_ulp_difference_counts_both_zeros_as_equal() -> None:
    least = torch.tensor([2**-149])
    assert ULPS.difference(least, -least) == 2
    assert ULPS.difference(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    wide = torch.tensor([1e300], dtype=torch.float64)
    assert ULPS.difference(wide, -wide) > 2**62


def test_relative_error_is_relative_to_largest_value() -> None:
    own = torch.tensor([1e-9, 100.0])
    assert RELATIVE.difference(own + torch.tensor([1e-3, 0.0]), own) == pytest.approx(1e-5)
    assert RELATIVE.difference(torch.tensor([1e-9]), torch.tensor([0.0])) == math.inf


@pytest.mark.parametrize("tolerance", [ULPS, RELATIVE], ids=str)
def test_infinities_and_nans_equal_only_themselves(tolerance: Tolerance) -> None:
    own = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    other_nan = own.clone()
    other_nan.view(torch.int32)[2] += 1
    assert tolerance.difference(other_nan, own) == 0
    for index in range(4):
        made = own.clone()
        made[index] = 3.4e38 if index < 3 else math.inf
        assert tolerance.difference(made, own) == math.inf


@pytest.mark.parametrize("tolerance", [ULPS, RELATIVE], ids=str)
def test_unequal_integers_dtypes_or_shapes_differ_infinitely(tolerance: Tolerance) -> None:
    numbers = torch.arange(4)
    assert tolerance.difference(numbers, numbers.clone()) == 0
    assert tolerance.difference(numbers + 1, numbers) == math.inf
    square = torch.ones(2, 2)
    assert tolerance.difference(square.double(), square) == math.inf
    assert tolerance.difference(square[:1], square) == math.inf
    assert tolerance.difference(torch.ones(0), torch.ones(0)) == 0


def test_plan_has_largest_difference_per_moved_call() -> None:
    calls = tuple(PlannedCall(i, f"call {i}", "worker", "it may", 0, 0, 0) for i in range(3))
    behind = [{0: "call 0"}, {0: "call 0", 1: "call 1"}, {}]
    plan = with_differences(Plan(moved=calls), behind, [3, 1, 0], Tolerance(4, "ulp"))
    assert [call.largest_difference for call in plan.moved] == [3, 1, None]
    reason = "it may; the largest difference so far is 1 unit in the last place"
    assert plan.moved[1].reason == reason
    assert plan.moved[2] == calls[2]
    assert with_differences(plan, behind, [3, 1, 0], Tolerance(4, "ulp")) is plan
    later = with_differences(plan, behind, [3, 2, 0], Tolerance(4, "ulp"))
    assert later.moved[1].reason == reason.replace("1 unit", "2 units")
