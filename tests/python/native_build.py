# SPDX-License-Identifier: Apache-2.0
"""The build folder of `make test`, as defined by setup.py, and the folder of the installed native
part."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from penstock import _C

ROOT = Path(__file__).resolve().parents[2]


@lru_cache(maxsize=1)
def build_folder() -> Path:
    command = [sys.executable, "setup.py", "-q", "native", "--show-folder"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return ROOT / done.stdout.strip()


def native_folder() -> Path:
    """Return the folder of the native part for this process's torch: the module `_C`,
    libpenstock.so and more."""
    return Path(_C.__file__).parent
