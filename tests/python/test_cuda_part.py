# SPDX-License-Identifier: Apache-2.0
"""The CUDA part is a separate file: without it, and with a torch that it does not fit, the loader
works, and a device is rejected with the reason. No GPU is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_build import native_folder

import penstock
from penstock import _C

PACKAGE = Path(penstock.__file__).parent
CUDA_PART = native_folder() / "libpenstock_cuda.so"

pytestmark = pytest.mark.slow

# Torch is made to report a device, so that the native part is asked for it.
PROGRAM = """
import torch
from penstock import DataLoader
rows = torch.utils.data.TensorDataset(torch.arange(8))
print(sum(int(batch.sum()) for batch, in DataLoader(rows, batch_size=4, num_workers=1)))
torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
try:
    [batch] = next(iter(DataLoader(rows, batch_size=4, num_workers=1, device="cuda:0")))
    print(batch.device)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The native folder of a copy of the package, which is first on the path."""
    shutil.copytree(PACKAGE, tmp_path / "penstock", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path / "penstock" / native_folder().relative_to(PACKAGE)


def device_output(copy: Path) -> str:
    """The program's output about the device; a worker sends its first batches."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(copy.parents[2])},
    )
    total, _, rest = done.stdout.partition("\n")
    assert total == "28", done.stdout + done.stderr
    return rest


def compile_library(source: str, target: Path, *options: str) -> None:
    """A library of a few lines of C."""
    file = target.with_suffix(".c")
    file.write_text(source)
    target.unlink(missing_ok=True)
    command = ["cc", "-shared", "-fPIC", str(file), "-o", str(target), *options]
    subprocess.run(command, check=True, timeout=60)


def needed(library: Path) -> str:
    command = ["readelf", "--dynamic", "--wide", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(line for line in listed.splitlines() if "(NEEDED)" in line)


def test_only_the_cuda_part_links_to_cuda_libraries() -> None:
    for library in (Path(_C.__file__), native_folder() / "libpenstock.so.0.1"):
        assert "libtorch_cpu" in needed(library)
        assert "cuda" not in needed(library)
    if CUDA_PART.exists():
        assert "libcudart.so" in needed(CUDA_PART) and "libc10_cuda.so" in needed(CUDA_PART)


def test_build_without_cuda_part_names_what_to_install(copy: Path) -> None:
    (copy / "libpenstock_cuda.so").unlink(missing_ok=True)
    assert (
        "device cuda:0 was requested, but this build of penstock does not support CUDA; install"
        in device_output(copy)
    )


@pytest.mark.long
def test_missing_cuda_libraries_are_named(copy: Path, tmp_path: Path) -> None:
    """As with a torch for the CPU, or for another CUDA."""
    compile_library("int of_cuda(void) { return 0; }", tmp_path / "libcudart_of_another.so")
    compile_library(
        "int of_cuda(void); int ask(void) { return of_cuda(); }",
        copy / "libpenstock_cuda.so",
        *(f"-L{tmp_path}", "-lcudart_of_another"),
    )
    said = device_output(copy)
    assert "penstock's library for CUDA" in said and "cannot be loaded with this torch" in said
    assert "libcudart_of_another.so" in said and "or pass device=None" in said


@pytest.mark.long
def test_cuda_part_of_another_build_is_rejected(copy: Path) -> None:
    compile_library(
        "unsigned long entries[8]; void* penstock_cuda_entries(void) { return entries; }",
        copy / "libpenstock_cuda.so",
    )
    said = device_output(copy)
    assert "libpenstock_cuda.so belongs to another build than the library that loads it" in said
    assert "two versions of penstock were installed over each other" in said


@pytest.mark.long
@pytest.mark.skipif(not CUDA_PART.exists(), reason="this build has no part for CUDA")
def test_cuda_part_loads_with_the_installed_torch(copy: Path) -> None:
    said = device_output(copy)
    if torch.cuda.device_count() == 0:
        assert "device cuda:0 was requested, but this machine has 0 CUDA devices" in said
    else:
        assert said == "cuda:0\n"
