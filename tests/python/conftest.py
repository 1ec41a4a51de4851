# SPDX-License-Identifier: Apache-2.0
"""Checks after every test that none of our processes, descriptors, shared memory and temporary
files are left."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import process_traces
import pytest
import tqdm

if TYPE_CHECKING:
    from pool_processes import PoolProcesses

# How long ending processes may take on a busy machine. A process that still exists afterwards does
# not end by itself.
EXIT_SECONDS_MAX = 10.0
# Descriptors that torch and Python open once and keep, independent of the test that needs them
# first.
KEPT_DESCRIPTORS = ("/dev/nvidia", "/dev/urandom", "/dev/null")
LINES_MAX = 20

CALL_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Put temporary files into a folder of this run, so that any file left there is known to be
    ours."""
    folder = tmp_path_factory.mktemp("t")
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    # Helpers that multiprocessing starts once per process; they are not a test's leak.
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    # torch.fx makes a progress bar if tqdm is installed, and tqdm's first bar makes a permanent
    # lock.
    tqdm.tqdm.get_lock()
    process_traces.start_cuda()
    if warm_programs := sys.modules.get("warm_programs"):  # a test module uses them
        warm_programs.start_nurseries()
    # Otherwise the garbage collection of each test scans all of torch, which took 0.1 s a test.
    gc.collect()
    gc.freeze()
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, _private_temporary_folder: Path
) -> Iterator[None]:
    before = take(_private_temporary_folder)
    yield
    if request.node.stash.get(CALL_FAILED, False):
        return  # its traceback keeps its objects alive, and one failure is enough to read
    process_traces.collect_garbage()
    process_traces.join_feeder_threads()
    deadline = time.monotonic() + EXIT_SECONDS_MAX
    # Wait for each by its process descriptor, and reap the ones that multiprocessing started. A
    # pool worker may still start a process for a trainer that has just left.
    while (left := left_since(before, _private_temporary_folder)).get("process"):
        process_traces.wait_gone(left["process"], deadline - time.monotonic())
        multiprocessing.active_children()
        if time.monotonic() >= deadline:
            break
    lines = [
        f"  {kind}: {describe(kind, thing)}"
        for kind, things in left.items()
        for thing in sorted(things, key=str)
    ]
    if len(lines) > LINES_MAX:
        lines[LINES_MAX:] = [f"  and {len(lines) - LINES_MAX} more"]
    if lines:
        pytest.fail("the test left behind\n" + "\n".join(lines), pytrace=False)


@pytest.fixture(scope="session")
def _steady_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    from pool_processes import pool_of

    with pytest.MonkeyPatch.context() as monkeypatch:
        opened = pool_of(tmp_path_factory.mktemp("steady"), monkeypatch)
        pool = next(opened)
        monkeypatch.undo()  # other tests have other keys
        pool.start_worker(processes=2)
        yield pool
        for _ in opened:
            pass


@pytest.fixture
def steady_pool(_steady_pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch) -> PoolProcesses:
    """A controller and two workers, for tests that only use them: each job has a separate process.
    Starting them takes longer than most of these tests."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", _steady_pool.environment["XDG_RUNTIME_DIR"])
    for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)
    return _steady_pool


@pytest.fixture(autouse=True)
def no_batch_types_are_left() -> Iterator[None]:
    """Forget the classes that a test has registered: later jobs would need their modules."""
    yield
    batch_types = sys.modules.get("penstock.stream.batch_types")
    if batch_types is not None:
        batch_types._registered.clear()
        batch_types._found.clear()


def left_since(before: Mapping[str, set[Any]], temporary_folder: Path) -> dict[str, set[Any]]:
    """Return the resources that were not there before, by kind."""
    now = take(temporary_folder)
    return {kind: things - before[kind] for kind, things in now.items() if things - before[kind]}


def take(temporary_folder: Path) -> dict[str, set[Any]]:
    """Return all resources that a test could leave behind, by kind."""
    return {
        "process": descendants(),
        "descriptor": {
            entry
            for entry in process_traces.descriptors()
            if not entry.partition(" -> ")[2].startswith(KEPT_DESCRIPTORS)
        },
        "shared mapping": set(process_traces.shared_mappings()),
        "temporary file": {path.name for path in temporary_folder.glob("*penstock*")},
    }


def descendants() -> set[int]:
    """Return the children and their descendants: a fork server's workers are not our direct
    children.

    A dead child that has not been reaped counts; dead processes further down are reaped by their
    parents.
    """
    found: set[int] = set()
    direct = process_traces.children()
    todo = list(direct)
    while todo:
        pid = todo.pop()
        try:
            todo.extend(process_traces.children(pid))
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended meanwhile
        if pid in direct or state != "Z":
            found.add(pid)
    return found


def describe(kind: str, thing: int | str) -> str:
    if kind != "process":
        return str(thing)
    try:
        status = Path(f"/proc/{thing}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{thing}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
    except OSError:
        return f"{thing} (gone meanwhile)"
    if status == "Z":
        return f"{thing}, dead, but nobody waited for it"
    return f"{thing}, still running after {EXIT_SECONDS_MAX} s: {command}"
