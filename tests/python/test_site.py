# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds without a warning, has every page and every public name, and
works without a network."""

from __future__ import annotations

import html
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.command_line import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "docs" / "site"
sys.path.insert(0, str(SCRIPTS))

from built_site import broken_links, external_resources, read_pages  # noqa: E402
from site_pages import GENERATED, groups, page_name  # noqa: E402
from staged_pages import BrokenLink, Staging, with_links  # noqa: E402

BUILD_S_MAX = 900


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    for module in ("sphinx", "furo", "myst_parser", "breathe"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; `make docs` and `make test-all` install it")
    if shutil.which("doxygen") is None:
        pytest.skip("doxygen is not installed; `make docs` and `make test-all` install it")
    folder = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "build_site.py", "--out", folder],
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


@pytest.mark.long
@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    missing = [path for path in documents if not (site / f"{page_name(path)}.html").is_file()]
    assert documents and missing == []


@pytest.mark.long
@pytest.mark.slow
def test_navigation_has_every_index_entry(site: Path) -> None:
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    links = read_pages(site)[site / "index.html"].links
    wanted = [f"{name}.html" for group in groups(contents) for _, name in group.entries]
    assert {f"{name}.html" for name in GENERATED} <= set(wanted)
    assert [name for name in wanted if name not in links] == []


@pytest.mark.long
@pytest.mark.slow
def test_site_is_self_contained_and_has_no_broken_links(site: Path) -> None:
    assert len(read_pages(site)) > 50
    assert external_resources(site) == []
    assert broken_links(site) == []


@pytest.mark.long
@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    ids = read_pages(site)[site / "reference" / "python.html"].ids
    assert [name for name in penstock.__all__ if f"penstock.{name}" not in ids] == []
    methods = ("state_dict", "load_state_dict", "stats", "lookahead", "start_prefetch", "plan")
    assert [name for name in methods if f"penstock.DataLoader.{name}" not in ids] == []


@pytest.mark.long
@pytest.mark.slow
def test_every_command_is_in_the_reference(site: Path) -> None:
    text = text_of(site / "reference" / "commands.html")
    assert [name for name in COMMANDS if f"usage: penstock {name}" not in text] == []


@pytest.mark.long
@pytest.mark.slow
def test_cpp_reference_lists_headers_and_has_doxygen_pages(site: Path) -> None:
    text = text_of(site / "reference" / "cpp.html")
    headers = (ROOT / "csrc" / "include" / "penstock").glob("*.h")
    assert [path.name for path in headers if path.name not in text] == []
    assert "begin_epoch" in text and "impl_" not in text
    page = (site / "cpp" / "classpenstock_1_1DataLoader.html").read_text(encoding="utf-8")
    assert "begin_epoch" in page and "load_state" in page


def tree_of(folder: Path, **pages: str) -> Path:
    """A repository with a few pages; `__` in a name stands for `/`."""
    (folder / "docs").mkdir()
    for name, text in {"README": "# Home\n", "docs__README": "# Contents\n", **pages}.items():
        path = folder / f"{name.replace('__', '/')}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    root = tree_of(tmp_path, docs__page="# Page\n\n[there](there.md)\n")
    with pytest.raises(BrokenLink, match=r"docs/page\.md links to there\.md"):
        Staging(root, tmp_path / "build" / "staged").write()


def test_linked_source_file_gets_a_page(tmp_path: Path) -> None:
    root = tree_of(tmp_path, docs__page="# Page\n\n[code](../code/a.py) [all](../code)\n")
    (root / "code").mkdir()
    (root / "code" / "a.py").write_text("print(1)\n")
    Staging(root, tmp_path / "build" / "staged").write()
    staged = tmp_path / "build" / "staged"
    assert "(source/code/a.py.md)" in (staged / "page.md").read_text()
    assert "print(1)" in (staged / "source" / "code" / "a.py.md").read_text()
    assert "(code/a.py.md)" in (staged / "source" / "code.md").read_text()


def test_links_in_code_are_unchanged() -> None:
    text = "[a](b)\n```python\n[a](b)\n```\n"
    assert with_links(text, str.upper) == "[a](B)\n```python\n[a](b)\n```\n"


def test_external_resources_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<img src="//cdn.example/a.png"><a href="https://example.org">a link is no load</a>'
        '<script src="here.js"></script>'
    )
    (tmp_path / "here.css").write_text("@import url(https://fonts.example/css);")
    assert external_resources(tmp_path) == [
        "a.html: //cdn.example/a.png",
        "here.css: https://fonts.example/css",
    ]
    assert broken_links(tmp_path) == ["a.html: here.js"]


def test_missing_anchor_is_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"></p><a href="#here">1</a><a href="#there">2</a>')
    assert broken_links(tmp_path) == ["a.html: #there"]
