# SPDX-License-Identifier: Apache-2.0
"""Programs that train on a device train on it with penstock as they do with torch's loader.

The device is the simulated GPU of tests/simgpu.
"""

from __future__ import annotations

import functools

import pytest
from device_process import run_on_simgpu
from device_styles import BATCH, SAMPLES, STYLES, Style, Training, run

pytestmark = pytest.mark.slow
DEVICE = "simgpu"

each_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@functools.cache
def trained(
    name: str, way: str, other_bits: tuple[str, ...] = (), device: str = DEVICE
) -> Training:
    training: Training = run_on_simgpu(run, name, way, device, other_bits)
    assert len(training.losses) == 2 * SAMPLES // BATCH
    return training


def prepare(style: Style) -> None:
    """Skips a style without its package."""
    if style.package:
        pytest.importorskip(style.package)


@each_style
def test_training_with_the_import_swapped_is_torchs(style: Style) -> None:
    prepare(style)
    expected, ours = trained(style.name, "torch"), trained(style.name, "swapped")
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)
    assert ours.bytes_in == expected.bytes_in


@pytest.mark.parametrize("cut", ["maximal", pytest.param("auto", marks=pytest.mark.long)])
@each_style
def test_training_with_a_cut_is_torchs(style: Style, cut: str) -> None:
    prepare(style)
    expected, ours = trained(style.name, "torch"), trained(style.name, cut)
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)
    if cut == "maximal":
        assert ours.moved == style.moved


@pytest.mark.parametrize("name", ["image moved, model prepares", "wave prepared in the loop"])
def test_an_operator_with_other_bits_on_the_device_changes_nothing(name: str) -> None:
    """Else a worker has computed in the place of the device what the device computes otherwise."""
    differing = ("div", "sub", "log", "_upsample_bilinear2d_aa")
    expected = trained(name, "torch", differing)
    ours = trained(name, "maximal", differing)
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)


def test_the_device_can_have_other_bits() -> None:
    name = "image moved, model prepares"
    assert trained(name, "torch").losses != trained(name, "torch", ("div",)).losses


def test_what_these_programs_prepare_moves_where_the_device_is_the_cpu() -> None:
    """Else no style could ever be cut."""
    ours = trained("image moved, model prepares", "maximal", device="cpu")
    assert {"float", "truediv", "sub", "interpolate"} <= ours.moved, ours
