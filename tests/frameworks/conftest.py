# SPDX-License-Identifier: Apache-2.0
"""Runs every framework test with torch's DataLoader, and with ours under torch's name.

The frameworks are the real ones, unmodified. The output of a run is compared bit for bit with an
earlier run on torch's class; for torch's half that shows that the run repeats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read by the frameworks when they are imported: the tests here use no network.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
)

import process_traces  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from limits import deadline, one_thread  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import penstock  # noqa: E402

TEST_SECONDS_MAX = 120.0
Run = Callable[[], Any]
_seen_with_torch: dict[Run, Any] = {}


@pytest.fixture(params=["torch", "penstock"])
def loader_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """While the test runs, torch's name refers to this test's DataLoader."""
    monkeypatch.setenv("PENSTOCK_FALLBACK", "error")
    if request.param == "penstock":
        penstock.install()
    yield str(request.param)
    penstock.uninstall()


@pytest.fixture
def same_as_torch(loader_name: str) -> Callable[[Run], Any]:
    """Plays a run with a fixed seed, compares its records with torch's, and returns the loader that
    it used. A run is a function that returns its records and that loader.
    """

    def play(run: Run) -> Any:
        torch.manual_seed(20260)
        return run()

    def check(run: Run) -> Any:
        if run not in _seen_with_torch:
            penstock.uninstall()
            _seen_with_torch[run], _ = play(run)
            if loader_name == "penstock":
                penstock.install()
        recorded, loader = play(run)
        assert recorded, "a run that records nothing compares nothing"
        assert recorded == _seen_with_torch[run]
        return loader

    return check


@pytest.fixture
def assert_used(loader_name: str) -> Callable[[Any], None]:
    """Checks that the iterated loader has the class that this half of the test is for."""

    def check(loader: Any) -> None:
        assert isinstance(loader, DataLoader)
        assert isinstance(loader, penstock.DataLoader) == (loader_name == "penstock")
        if loader_name == "penstock":
            assert loader.stats().iterator == "penstock"

    return check


@pytest.fixture(scope="session", autouse=True)
def _warm_programs() -> None:
    if warm_programs := sys.modules.get("warm_programs"):  # a test module uses them
        warm_programs.start_nurseries()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks keep caches and logs in their working folder and at home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in the same order on every machine."""
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    with deadline(TEST_SECONDS_MAX):
        yield


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = process_traces.take()
    yield
    assert process_traces.left_since(before, kinds={"children"}) == {}
