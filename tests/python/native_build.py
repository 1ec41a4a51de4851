# SPDX-License-Identifier: Apache-2.0
"""Where `make test` has built the native part, as setup.py says, and where it is installed."""

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
    """What is installed for the torch of this process: the module `_C`, libpenstock.so and more."""
    return Path(_C.__file__).parent
