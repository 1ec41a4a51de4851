# SPDX-License-Identifier: Apache-2.0
"""Programs that train on a device get the same results with penstock as with torch's loader.

The device is the simulated GPU of tests/simgpu.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from device_process import run_on_simgpu
from device_styles import (
    BATCH,
    COMBINATIONS,
    PLAIN,
    SAMPLES,
    STYLES,
    Combination,
    Style,
    Training,
    run,
)
from pool_processes import pool_of

pytestmark = pytest.mark.slow
DEVICE = "simgpu"

each_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@functools.cache
def trained(
    name: str,
    way: str,
    other_bits: tuple[str, ...] = (),
    device: str = DEVICE,
    combination: Combination = PLAIN,
    pool: str = "",  # of which a combination's workers are
) -> Training:
    options = (combination, pool)
    training: Training = run_on_simgpu(run, name, way, device, other_bits, *options)
    assert len(training.losses) == combination.loader_count * 2 * SAMPLES // BATCH
    return training


def prepare(style: Style) -> None:
    """Skips a style without its package."""
    if style.package:
        pytest.importorskip(style.package)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of a pool with two workers, by which `run` finds it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("p"), monkeypatch):
            opened.start_worker(processes=2)
            yield f"{opened.endpoint} {opened.environment['XDG_RUNTIME_DIR']}"


@each_style
def test_training_with_swapped_import_matches_torch(style: Style) -> None:
    prepare(style)
    expected, ours = trained(style.name, "torch"), trained(style.name, "swapped")
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)
    assert ours.bytes_in == expected.bytes_in


@each_style
def test_training_with_device_auto_matches_torch(style: Style) -> None:
    prepare(style)
    expected, ours = trained(style.name, "torch"), trained(style.name, "followed")
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)
    # Few batches had been copied ahead without being wanted.
    assert ours.bytes_in < 1.3 * expected.bytes_in


def combinations() -> Iterator[Any]:
    """Each style in each combination with each cut. `make test` has each style as it is, and each
    other combination once, with as many styles; `make test-all` has all."""
    others = [combination for combination in COMBINATIONS if combination != PLAIN]
    for index, style in enumerate(STYLES):
        usual = {PLAIN}
        if index < len(others):
            usual.add(others[5 * index % len(others)])
        for combination in COMBINATIONS:
            for cut in ("maximal", "auto"):
                is_long = cut == "auto" or combination not in usual
                yield pytest.param(
                    style,
                    combination,
                    cut,
                    id=f"{style.name}-{combination}-{cut}",
                    marks=pytest.mark.long if is_long else (),
                )


@pytest.mark.parametrize(("style", "combination", "cut"), [*combinations()])
def test_training_with_a_cut_matches_torch(
    style: Style, combination: Combination, cut: str, request: pytest.FixtureRequest
) -> None:
    prepare(style)
    local = dataclasses.replace(combination, place="local")
    expected = trained(style.name, "torch", combination=local)
    served_by = request.getfixturevalue("pool") if combination.place == "pool" else ""
    ours = trained(style.name, cut, combination=combination, pool=served_by)
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)
    if cut == "maximal":
        assert ours.moved == combination.loader_count * (style.moved,)


@pytest.mark.parametrize("name", ["image moved, model prepares", "wave prepared in the loop"])
def test_operator_with_other_bits_on_device_matches_torch(name: str) -> None:
    """Otherwise a worker has computed operations that give other bits on the device."""
    differing = ("div", "sub", "log", "_upsample_bilinear2d_aa")
    expected = trained(name, "torch", differing)
    ours = trained(name, "maximal", differing)
    assert (ours.losses, ours.parameters) == (expected.losses, expected.parameters)


def test_simulated_device_can_have_other_bits() -> None:
    name = "image moved, model prepares"
    assert trained(name, "torch").losses != trained(name, "torch", ("div",)).losses


def test_preparation_moves_if_the_device_is_the_cpu() -> None:
    """Otherwise no style could ever be cut."""
    ours = trained("image moved, model prepares", "maximal", device="cpu")
    assert {"float", "truediv", "sub", "interpolate"} <= ours.moved[0], ours
