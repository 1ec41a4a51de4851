# SPDX-License-Identifier: Apache-2.0
"""Runs every contract test on torch's DataLoader and on ours, and checks for leftovers.

A test that torch's loader fails is a wrong test. If penstock cannot be imported, its half fails:
there is no skipping.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.resource_sharer
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import process_traces
import pytest
from limits import deadline, one_thread

LOADER_MODULES = {"torch": "torch.utils.data", "penstock": "penstock"}
TEST_SECONDS_MAX = 240.0  # many times the time of the longest on two idle cores
CALL_FAILED = pytest.StashKey[bool]()


@pytest.fixture(params=sorted(LOADER_MODULES, reverse=True))
def loader_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loader_class(loader_name: str) -> type:
    return importlib.import_module(LOADER_MODULES[loader_name]).DataLoader  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Temporary files of loaders are placed in a folder of this run alone, so that leftovers are
    detected."""
    folder = tmp_path_factory.mktemp("t")
    os.environ["TMPDIR"] = str(folder)
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    tempfile.tempdir = str(folder)
    # Processes that multiprocessing starts once and keeps are not a loader's to clean up.
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    os.close(multiprocessing.resource_sharer.DupFd(0).detach())
    process_traces.start_cuda()
    # Every test collects garbage twice: objects that are there now need not be looked at again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback to torch's iterator would let penstock's half of this suite test torch."""
    monkeypatch.setenv("PENSTOCK_FALLBACK", "error")


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    with deadline(TEST_SECONDS_MAX):
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Torch's threads would add mappings and threads that are not a loader's."""
    with one_thread():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left(
    request: pytest.FixtureRequest, _private_temporary_folder: None
) -> Iterator[None]:
    """No child, descriptor, shared memory, mapping or temporary file outlives a test."""
    before = process_traces.take(Path(tempfile.gettempdir()))
    yield
    if request.node.stash.get(CALL_FAILED, False):
        return  # its traceback keeps its objects alive, and one failure is enough to read
    if request.node.get_closest_marker("torch_may_leave") and "[torch" in request.node.name:
        return
    left = process_traces.left_since(before, Path(tempfile.gettempdir()))
    assert not left, f"the test left {left}"
