# SPDX-License-Identifier: Apache-2.0
"""The measurement of a device's bits finds the differences, on a device whose last bits are
known."""

from __future__ import annotations

import pytest
import simgpu
import torch
from device_process import on_simgpu
from measure_bits import form_of, measure, own_calls

from penstock import _C

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"


@on_simgpu
def test_measurement_finds_exactly_the_differing_operators() -> None:
    with simgpu.other_bits("exp", "upsample_bilinear2d"):
        meter = measure(DEVICE, own_calls(DEVICE, elements=1000))
    assert {form.partition("(")[0].partition(".")[0] for form in meter.differing} == {
        "exp",
        "upsample_bilinear2d",
    }
    assert {"mul.Tensor(float32,float32)", "div.Scalar(uint8,i)"} <= set(meter.equal)
    table = meter.table("a device of the tests")
    assert "differs exp(float32)\n" in table and "equal sin(float32)\n" in table
    _C.add_device_bits(table.replace("device simgpu", "device measured"))


@on_simgpu
def test_measured_form_matches_that_of_the_analysis() -> None:
    x = torch.ones(3)
    assert form_of(torch.ops.aten.div.Tensor, (x, 255), {}) == "div.Scalar(float32,i)"
    assert form_of(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.int8, "device": "x"}) == (
        "_to_copy(float32,dtype=int8)"
    )
    assert form_of(torch.ops.aten.cat.default, ([x, x], 1), {}) == "cat([float32...],i)"
