# SPDX-License-Identifier: Apache-2.0
"""The count of unidiomatic patterns in the documents, and its bounds for the documents of this
tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".make" / "prose.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("prose_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PROSE = loaded()
BY_NAME = {pattern.name: pattern for pattern in PROSE.PATTERNS}


def hits(tmp_path: Path, text: str) -> list[tuple[str, int, str]]:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return [
        (counted.pattern.name, hit.line, hit.text)
        for counted in PROSE.count([page])
        for hit in counted.hits
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("what-clause", "What is sent"),
        ("comes, goes", "The batch comes late"),
        ("says, tells", "The log says so"),
        ("nobody, somebody, nothing", "Nothing is sent"),
        ("of its own", "A process of its own"),
        ("of its own", "The program's own loader"),
        ("of its own", "The users' own loaders"),
        ("those that, that of", "Those that were cut"),
        ("begins", "An epoch begins"),
        ("beside", "Torch beside numpy"),
        ("to the bit", "Equal to the bit"),
        ("unusual word", "Started anew"),
    ],
)
def test_patterns_are_found(tmp_path: Path, name: str, text: str) -> None:
    assert [(found, line) for found, line, _ in hits(tmp_path, f"# Page\n\n{text}.\n")] == [
        (name, 3)
    ]


@pytest.mark.parametrize("pattern", PROSE.PATTERNS, ids=lambda pattern: pattern.name)
def test_every_pattern_matches_its_example_and_not_the_better_wording(pattern: Any) -> None:
    bad, _, better = pattern.instead.partition(" -> ")
    assert list(pattern.find(bad)) != []
    assert [one.name for one in PROSE.PATTERNS if list(one.find(better))] == []


def test_pattern_is_found_across_a_line_break(tmp_path: Path) -> None:
    assert hits(tmp_path, "This is what\nis sent.\n") == [("what-clause", 1, "what is")]


@pytest.mark.parametrize(
    "text",
    [
        "```\nnobody says what is\n```",
        "~~~ sh\nnobody says what is\n~~~",
        "- a list:\n  ```python\n  # nobody says what is\n  ```",
        "    nobody says what is",
        "| nobody | says what is |",
        "> nobody says what is",
        "<!-- nobody says what is -->",
        "[it]: https://example.org/nobody",
        "[a page](where-time-goes.md#nobody)",
        "The option `what is told to nobody` is set.",
    ],
)
def test_code_tables_quotations_and_addresses_are_not_prose(tmp_path: Path, text: str) -> None:
    assert hits(tmp_path, f"A page.\n\n{text}\n") == []


def test_text_behind_code_is_prose_with_its_line(tmp_path: Path) -> None:
    text = "```\ncode\n```\n\n[Nobody](page.md) knows.\n"
    assert hits(tmp_path, text) == [("nobody, somebody, nothing", 5, "Nobody")]


def test_rate_at_the_bound_passes_and_above_it_prints_each_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = int(BY_NAME["what-clause"].bound)
    pages = [tmp_path / "filler.md", tmp_path / "page.md"]
    pages[0].write_text("word " * (10_000 - 2 * bound - 2), encoding="utf-8")
    pages[1].write_text("what is\n" * bound + "a word\n", encoding="utf-8")
    arguments = [str(page) for page in pages]

    assert PROSE.main(arguments) == 0
    assert capsys.readouterr().out == ""

    pages[1].write_text("what is\n" * (bound + 1), encoding="utf-8")
    assert PROSE.main(arguments) == 1
    *lines, figure = capsys.readouterr().out.splitlines()
    assert lines == [f'{pages[1]}:{k + 1}: "what is" (what-clause)' for k in range(bound + 1)]
    assert figure.startswith("what-clause: 4.0 per 10,000 words, at most 3 allowed; for example ")


def test_figures_are_printed_where_all_bounds_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("", encoding="utf-8")
    assert PROSE.main(["--figures", str(page)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PROSE.PATTERNS)


def test_documents_of_users_and_of_developers_are_counted() -> None:
    names = {str(path.relative_to(PROSE.ROOT)) for path in PROSE.documents()}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/how-to/pools.md",
        "csrc/README.md",
        "csrc/net/README.md",
        "python/penstock/README.md",
    } <= names


@pytest.mark.parametrize(
    "counted", PROSE.count(PROSE.documents()), ids=lambda counted: counted.pattern.name
)
def test_documents_keep_the_bounds(counted: Any) -> None:
    places = [f"{hit.path.relative_to(PROSE.ROOT)}:{hit.line}: {hit.text}" for hit in counted.hits]
    assert counted.rate <= counted.pattern.bound, places
