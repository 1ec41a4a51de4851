# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools', which also requires the torch to build penstock for.

A build works with one minor version of torch. An isolated build cannot see the installed torch, so
PENSTOCK_TORCH names its version ("2.13"). The default is the newest supported version, which pip
would install for penstock anyway.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the hooks that stay as they are)

_VERSIONS = Path(__file__).resolve().parents[1] / "python" / "penstock" / "_version.py"
# torch has no wheel for these: by the version of Python, the newest that it has.
_NEWEST_FOR = {(3, 10): "2.14"}


def torch_to_build_with() -> str:
    """A requirement of pip's. Ends the build for a torch that penstock is not for."""
    text = _VERSIONS.read_text(encoding="utf-8")
    minors = re.findall(r'"(\d+\.\d+)"', text.partition("TORCH_MINORS =")[2])
    newest = _NEWEST_FOR.get(sys.version_info[:2], minors[-1])
    wanted = os.environ.get("PENSTOCK_TORCH") or newest
    if wanted not in minors:
        sys.exit(f"PENSTOCK_TORCH must be one of {', '.join(minors)}, got {wanted!r}")
    return f"torch=={wanted}.*"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), torch_to_build_with()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), torch_to_build_with()]
