# SPDX-License-Identifier: Apache-2.0
"""Find the packages named penstock on Python's path. Python imports the first and ignores the
others, which is seldom intended if there are several."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class FoundPackage(NamedTuple):
    folder: Path
    version: str  # "unknown" if the package does not define it
    is_built: bool  # otherwise it is a source tree, which has no native parts


def packages_on_path(path: Sequence[str] | None = None) -> list[FoundPackage]:
    """Return the packages in the order of the path (``sys.path``), without duplicates."""
    found: dict[Path, FoundPackage] = {}
    for entry in sys.path if path is None else path:
        folder = Path(entry or ".") / "penstock"
        if (folder / "__init__.py").is_file():
            real = folder.resolve()
            is_built = any(folder.glob("_pool*.so"))
            found.setdefault(real, FoundPackage(folder.absolute(), _version(folder), is_built))
    return list(found.values())


def _version(folder: Path) -> str:
    try:
        text = (folder / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    return found[1] if found else "unknown"
