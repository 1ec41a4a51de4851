# SPDX-License-Identifier: Apache-2.0
"""Code of a user page, as run by a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def code_of(page: str, heading: str) -> str:
    """Return the first Python block below a heading of a page in docs/how-to."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert found is not None, f"{page} has no heading {heading}"
    block = re.search(r"^```python\n(.*?)^```", text[found.end() :], re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1]


def names_of(page: str, heading: str) -> dict[str, Any]:
    """Return the names that this block defines."""
    names: dict[str, Any] = {}
    exec(compile(code_of(page, heading), f"{page}, {heading}", "exec"), names)
    return names
