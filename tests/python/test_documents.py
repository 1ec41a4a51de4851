# SPDX-License-Identifier: Apache-2.0
"""The pages that people read first: short, with lines that fit, working links and code that
parses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_snippets import GUIDE

ROOT = Path(__file__).resolve().parents[2]
# Pages for users. The READMEs in the code folders have separate tests.
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / folder / "README.md" for folder in ("examples", "deploy", "deploy/systemd")),
        *(ROOT / "docs").rglob("*.md"),
        GUIDE,
    ]
)
README_LINES_MAX = 150
COLUMNS_MAX = 120

LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines outside tables and code, with their numbers."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "    ")):
            yield number, line


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_lines_fit_the_width(page: Path) -> None:
    assert [(number, line) for number, line in prose(page) if len(line) > COLUMNS_MAX] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [name for name in files if name and not (page.parent / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for block in PYTHON.findall(page.read_text(encoding="utf-8")):
        compile(block, str(page), "exec")


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in pages if name != "README.md" and f"({name})" not in index] == []
