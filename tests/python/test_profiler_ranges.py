# SPDX-License-Identifier: Apache-2.0
"""torch.profiler and Nsight show the batches of a loader, the waits for them and their causes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset
from worker_gate import WorkerGate, wait_until_ready

from penstock import _C, DataLoader
from penstock.loader import watched_steps

pytestmark = pytest.mark.slow


class Rows(Dataset[torch.Tensor]):
    """Sample 9 waits at a gate, if there is one."""

    def __init__(self, gate: WorkerGate | None = None) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.gate is not None and index == 9:
            self.gate.pass_through()
        return torch.full((3,), float(index))


def ranges_of(batches: Any) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in batches:
            pass
    return [one for one in profiler.events() if one.name.startswith("penstock: ")]


def test_batch_range_contains_wait_and_unpack_ranges() -> None:
    gate = WorkerGate()
    loader = DataLoader(Rows(gate), batch_size=4, num_workers=1)
    with contextlib.closing(gate), gate.opened_once_waiting(loader, given=2):
        ranges = ranges_of(loader)
    batches = {one.name: one.time_range for one in ranges if "batch " in one.name}
    assert set(batches) == {f"penstock: batch {number}" for number in range(7)}  # 6 is the end
    late = batches["penstock: batch 2"]
    inside = {
        one.name
        for one in ranges
        if late.start <= one.time_range.start and one.time_range.end <= late.end
    }
    assert {"penstock: wait", "penstock: unpack", "penstock: waited for the dataset"} <= inside
    assert [one.name for one in ranges].count("penstock: unpack") == 6


def test_ready_batches_have_no_wait_range() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, prefetch_factor=6)
    batches = iter(loader)
    wait_until_ready(loader, 6)
    waited = [one for one in ranges_of(batches) if one.name.startswith("penstock: waited for")]
    assert waited == []


def test_in_process_batches_have_ranges() -> None:
    class Long(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(watched_steps._WAIT_SHOWN_S)  # shorter waits are not shown
            return super().__getitem__(index)

    ranges = ranges_of(DataLoader(Long(), batch_size=4))
    assert "penstock: batch 5" in {one.name for one in ranges}
    assert "penstock: waited for the dataset" in {one.name for one in ranges}


def test_is_profiled_only_inside_a_profiler() -> None:
    assert not _C.is_profiled()
    with profile(activities=[ProfilerActivity.CPU]):
        assert _C.is_profiled()
    assert not _C.is_profiled()


def test_error_ends_its_profiler_range() -> None:
    def raise_it() -> None:
        raise KeyError("missing")

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(KeyError, match="missing"):
            _C.in_profiler_range("penstock: of a test", raise_it)
    assert "penstock: of a test" in {one.name for one in profiler.events()}


# Its first sample is late: it waits until NVTX has reported that the trainer waits for it.
PROGRAM = """
import os
import pathlib
import time

import torch
from penstock import DataLoader


class Late(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        heard = pathlib.Path(os.environ.get("NVTX_LISTENER", "absent"))
        ranges = "PENSTOCK_NVTX" in os.environ and heard.name != "absent"
        until = time.monotonic() + 60
        while ranges and index == 0 and time.monotonic() < until:
            if heard.exists() and "penstock: wait" in heard.read_text():
                break
            time.sleep(0.01)
        return torch.tensor([float(index)])


if __name__ == "__main__":
    print(sum(len(rows) for rows in DataLoader(Late(), batch_size=4, num_workers=1)))
"""


def trained(tmp_path: Path, **variables: str) -> str:
    """The standard error of a small training."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr
    return done.stderr


@pytest.fixture
def listener(tmp_path: Path) -> Path:
    """A library that receives NVTX ranges as Nsight does."""
    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA, and so without NVTX")
    include = nvtx_include()
    compiler = shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("NVTX's headers, or g++, are not installed")
    library = tmp_path / "listener.so"
    source = Path(__file__).with_name("nvtx_listener.cpp")
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-I", str(include), str(source)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=120)
    return library


def nvtx_include() -> Path | None:
    """From CUDA's packages, or from CUDA itself."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(name) for name in spec.submodule_search_locations or ()] if spec else []
    found = [path for folder in folders for path in folder.glob("*/include/nvtx3/nvToolsExt.h")]
    found += Path("/usr/local").glob("cuda*/include/nvtx3/nvToolsExt.h")
    return found[0].parents[1] if found else None


def test_nvtx_ranges_are_sent_if_variable_is_set(tmp_path: Path, listener: Path) -> None:
    heard = tmp_path / "heard"
    variables = {"NVTX_INJECTION64_PATH": str(listener), "NVTX_LISTENER": str(heard)}
    trained(tmp_path, PENSTOCK_NVTX="1", **variables)
    lines = heard.read_text().splitlines()
    assert [line for line in lines if "batch" in line] == [
        f"push penstock: batch {number}" for number in range(4)
    ]
    assert "push penstock: wait" in lines and lines.count("push penstock: unpack") == 3
    assert lines.count("pop") == len(lines) / 2
    heard.unlink()
    trained(tmp_path, **variables)
    assert "penstock" not in (heard.read_text() if heard.exists() else "")


def test_torch_without_nvtx_warns(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has NVTX")
    assert "PENSTOCK_NVTX is 1" in trained(tmp_path, PENSTOCK_NVTX="1")


@pytest.mark.cuda
def test_emit_nvtx_enables_batch_ranges() -> None:
    with torch.autograd.profiler.emit_nvtx():
        assert _C.is_profiled()
        assert len(list(DataLoader(Rows(), batch_size=4, num_workers=1))) == 6
