# SPDX-License-Identifier: Apache-2.0
"""Measure how far a worker's results are from a device's, if the user allows a difference.

The difference of two tensors is the largest difference of their elements, in units in the last
place, or relative to the largest magnitude in the device's tensor: numbers near zero, which remain
when large ones cancel, have no digits in common and are still accurate relative to that magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch

from penstock.graph.constants import is_same_bits
from penstock.graph.plan import Plan, PlannedCall

_ULPS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_EXACT_ULPS_MAX = float(1 << 62)  # above this, a difference of 64-bit integers may overflow


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference that is allowed."""

    largest: float
    unit: Literal["ulp", "relative"]

    @staticmethod
    def of(cut_tolerance: Any) -> Tolerance | None:
        """Parse the option of `offload` and `explain`: ulps or a relative error."""
        if cut_tolerance is None:
            return None
        if isinstance(cut_tolerance, Real) and not isinstance(cut_tolerance, bool):
            largest = float(cut_tolerance)
            if isinstance(cut_tolerance, Integral) and largest >= 1:
                return Tolerance(largest, "ulp")
            if not isinstance(cut_tolerance, Integral) and 0 < largest < 1:
                return Tolerance(largest, "relative")
        raise (ValueError if isinstance(cut_tolerance, Real) else TypeError)(
            f"cut_tolerance must be an integer >= 1 (units in the last place), or a float above 0 "
            f"and below 1 (relative error), got {cut_tolerance!r}; leave it out for equal bits"
        )

    def __str__(self) -> str:
        return self.format(self.largest)

    def format(self, difference: float) -> str:
        """Return a difference as text for users."""
        if math.isinf(difference):
            return "more than can be measured"
        if self.unit == "relative":
            return f"{difference:.3g} of the largest value"
        return f"{difference:,.0f} unit{'s' if difference != 1 else ''} in the last place"

    def excess_reason(self, difference: float) -> str:
        """Return why a call stays that would move by the tolerance."""
        return (
            f"results that depend on it differ from the device's by {self.format(difference)}; "
            f"cut_tolerance allows {self}"
        )

    def difference(self, made: torch.Tensor, own: torch.Tensor) -> float:
        """Return the difference between `made` and the device's `own`; inf if incomparable."""
        if is_same_bits(made, own):
            return 0.0
        if (made.dtype, made.shape, made.stride()) != (own.dtype, own.shape, own.stride()):
            return math.inf
        made, own = (_real_numbers(tensor) for tensor in (made, own))
        if own.dtype not in _ULPS:
            return math.inf
        is_finite = made.isfinite() & own.isfinite()
        is_alike = (made == own) | (made.isnan() & own.isnan())
        if not bool((is_finite | is_alike).all()):
            return math.inf
        made, own = made.where(is_finite, 0), own.where(is_finite, 0)
        return _ulps(made, own) if self.unit == "ulp" else _relative(made, own)


def with_differences(
    plan: Plan,
    behind: Sequence[Iterable[int]],
    differences: Sequence[float],
    tolerance: Tolerance | None,
) -> Plan:
    """Return the plan with the largest `differences` of its boundary values so far.

    They are shown at the calls that move by the tolerance; `behind` has these calls for each
    boundary value.
    """
    largest: dict[int, float] = {}
    for units, difference in zip(behind, differences, strict=True):
        for unit in units:
            largest[unit] = max(difference, largest.get(unit, 0.0))
    if tolerance is None or all(
        call.largest_difference == largest.get(call.index) for call in plan.moved
    ):
        return plan

    def shown(call: PlannedCall) -> PlannedCall:
        if call.index not in largest:
            return call
        difference = largest[call.index]
        reason = call.reason.partition(_DIFFERENCE_NOTE)[0]
        reason += f"{_DIFFERENCE_NOTE}{tolerance.format(difference)}"
        return replace(call, reason=reason, largest_difference=difference)

    return replace(plan, moved=tuple(map(shown, plan.moved)))


_DIFFERENCE_NOTE = "; the largest difference so far is "


def _real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _ulps(made: torch.Tensor, own: torch.Tensor) -> float:
    """Return the largest distance of corresponding elements, in units in the last place."""
    a, b = _places(made), _places(own)
    apart = (a - b).abs()
    if own.dtype is torch.float64:
        rough = (a.double() - b.double()).abs().max().item()
        if rough > _EXACT_ULPS_MAX:
            return float(rough)
    return float(apart.max().item())


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank of each number among all numbers of its dtype; both zeros have rank 0."""
    bits = tensor.contiguous().view(_ULPS[tensor.dtype])
    places = bits.long()
    return places.where(places >= 0, torch.iinfo(bits.dtype).min - places)


def _relative(made: torch.Tensor, own: torch.Tensor) -> float:
    wide = torch.promote_types(own.dtype, torch.float32)
    made, own = made.to(wide), own.to(wide)
    apart, largest = (made - own).abs().max().item(), own.abs().max().item()
    return float(apart / largest) if largest else (math.inf if apart else 0.0)
