# SPDX-License-Identifier: Apache-2.0
"""The kernels compile by themselves: with nvcc alone, and without torch's headers. The work of
their threads is tested on the CPU in tests/cpp/wire/narrow_test.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "device" / "widen_kernels.cu"

pytestmark = pytest.mark.slow


def find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if nvcc is None:
        pytest.skip("this machine has no nvcc")
    return nvcc


@pytest.mark.long
def test_kernels_compile_without_torch(tmp_path: Path) -> None:
    made = tmp_path / "widen_kernels.o"
    warnings = ["-Xcompiler=-Wall,-Wextra,-Werror", "-Werror=all-warnings"]
    command = [find_nvcc(), "-std=c++20", "-arch=sm_80", *warnings, f"-I{ROOT / 'csrc'}"]
    done = subprocess.run(
        [*command, "-c", str(KERNELS), "-o", str(made)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert made.stat().st_size > 0
