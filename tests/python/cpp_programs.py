# SPDX-License-Identifier: Apache-2.0
"""C++ programs, built in the way of a user: in a separate folder, from the installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
_BUILD_S_MAX = 1800  # for the library itself, if a program builds it from source


def cmake_dir() -> str:
    command = [sys.executable, "-m", "penstock", "--cmake-dir"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whether or not it succeeds."""
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=_BUILD_S_MAX, **options
    )  # type: ignore[call-overload,no-any-return]


def configure(
    source: Path, build: Path, *options: str, prefix: str | None = None
) -> subprocess.CompletedProcess[str]:
    if shutil.which("ccache"):
        options = ("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", *options)
    found = cmake_dir() if prefix is None else prefix
    return run(
        *("cmake", "-G", "Ninja", "-S", source, "-B", build),
        *(f"-DCMAKE_PREFIX_PATH={found}", f"-DPython_EXECUTABLE={sys.executable}", *options),
    )


def build_example(name: str, folder: Path, *options: str, prefix: str | None = None) -> Path:
    """Copy an example out of the tree, build it in ``folder``, and return its build folder."""
    source, build = folder / name, folder / f"{name}-build"
    shutil.copytree(EXAMPLES / name, source)
    configured = configure(source, build, *options, prefix=prefix)
    assert configured.returncode == 0, configured.stdout + configured.stderr
    built = run("cmake", "--build", build, env={**os.environ, "NINJA_STATUS": ""})
    assert built.returncode == 0, built.stdout + built.stderr
    return build
