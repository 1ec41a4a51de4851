# SPDX-License-Identifier: Apache-2.0
"""The supported versions of torch and Python."""

from __future__ import annotations

import re
from pathlib import Path

from penstock._version import TORCH_MINORS as TORCHES

__all__ = ["MISSING_WHEELS", "PYTHONS", "TORCHES"]

_PYPROJECT = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8")
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _PYPROJECT)

# (torch, Python) for which torch itself has no wheel.
MISSING_WHEELS = {("2.15", "3.10")}
