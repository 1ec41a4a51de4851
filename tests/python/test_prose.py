# SPDX-License-Identifier: Apache-2.0
"""The count of unidiomatic patterns in documents and code, and its bounds for this tree."""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".make" / "prose.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("prose_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


PROSE = loaded()
PROSE_OF_CODE = sys.modules["prose_of_code"]
BY_NAME = {pattern.name: pattern for pattern in PROSE.PATTERNS}


def hits(tmp_path: Path, text: str, name: str = "page.md") -> list[tuple[str, int, str]]:
    page = tmp_path / name
    page.write_text(text, encoding="utf-8")
    return [
        (counted.pattern.name, hit.line, hit.text)
        for counted in PROSE.count(PROSE.sections([page]))
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
def test_pattern_matches_only_its_bad_example(pattern: Any) -> None:
    bad, _, better = pattern.instead.partition(" -> ")
    assert list(pattern.find(bad)) != []
    assert [one.name for one in PROSE.PATTERNS if list(one.find(better))] == []


@pytest.mark.parametrize(
    "text",
    [
        "There is nothing to do",
        "Nothing else to wait for",
        "A second call does nothing",
        "Samples that cost nothing",
        "Returns nothing",
        "The log goes to stdout",
        "Traffic goes through a proxy",
        "The package came with torch",
        "The lock goes out of scope",
        "Inputs come first",
        "The link goes down",
        "The position at the beginning of the file",
        "What happens next",
        "The goal and the begging question",
    ],
)
def test_usual_phrases_with_the_words_of_a_pattern_are_not_found(tmp_path: Path, text: str) -> None:
    assert hits(tmp_path, f"{text}.\n") == []


def test_pattern_next_to_a_usual_phrase_is_found(tmp_path: Path) -> None:
    text = "It does nothing, and nothing is sent. Nothing to do.\n"
    assert hits(tmp_path, text) == [("nobody, somebody, nothing", 1, "nothing")]


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
def test_code_tables_quotations_and_links_are_not_counted(tmp_path: Path, text: str) -> None:
    assert hits(tmp_path, f"A page.\n\n{text}\n") == []


def test_text_after_code_is_counted_with_its_line(tmp_path: Path) -> None:
    text = "```\ncode\n```\n\n[Nobody](page.md) knows.\n"
    assert hits(tmp_path, text) == [("nobody, somebody, nothing", 5, "Nobody")]


def test_rate_above_the_bound_fails_and_lists_the_hits(
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
    assert figure.startswith(
        "documents: what-clause: 4 in 10,000 words, at most 3 allowed; for example "
    )


def test_single_use_in_a_short_text_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("what is\n", encoding="utf-8")
    assert PROSE.main([str(page)]) == 0
    page.write_text("what is\n" * 2, encoding="utf-8")
    assert PROSE.main([str(page)]) == 1


def words(text: str) -> str:
    """Return the texts on one line, with "|" between them."""
    texts = (" ".join(one.split()) for one in text.split(PROSE_OF_CODE.END.strip()))
    return " | ".join(one for one in texts if one)


@pytest.mark.parametrize(
    ("source", "comments", "printed"),
    [
        ('"""A module.\n\nMore of it.\n"""\n', "A module. More of it.", ""),
        ('def f():\n    """Return it."""\n', "Return it.", ""),
        ("class A:\n    r'''Has a \\\\.'''\n\n    x = 1\n", "Has a \\\\.", ""),
        ('x: int\n"""An attribute."""\n', "An attribute.", ""),
        ("x = 1  # one\n#: two\n", "one | : two", ""),
        ("# a line\n# and its next\n\n# another\n", "a line and its next | another", ""),
        ("x = 1  # of the\ny = 2  # same column\n", "of the same column", ""),
        ("x = 1  # of one\nlong = 2  # and another\n", "of one | and another", ""),
        ("x = '# no comment at all'\n", "", "# no comment at all"),
        ('x = "a \\" # no comment"  # but this\n', "but this", 'a " # no comment'),
        ('f("""one\n# two three"""); x = \'"\'  # four\n', "four", "one # two three"),
        ('x = [\n    "not a docstring here",\n]\n', "", "not a docstring here"),
        ('x = 1 + \\\n"not a docstring here"\n', "", "not a docstring here"),
        ("f(f\"x must be {a['b']}, got {{{c:{d}}}}\")\n", "", "x must be X, got {X}"),
        ('f("one text in "\n  f"{count} parts")\n', "", "one text in X parts"),
        ('f("one text", "another one")\n', "", ""),
        ('f("this has words", "and this has")\n', "", "this has words | and this has"),
        ('x = "short"\ny = a + " of the " + b\n', "", "of the"),
        ('x = "snake_case {a} f(b) = 3"\n', "", ""),
        ("x = b'not a text at all'\n", "", ""),
        ('x = "a line\\nand a tab\\tof it"\n', "", "a line and a tab of it"),
        ("# `what is` here, ``what is`` there\n", "X here, X there", ""),
        ("# See https://example.org/what/is, begin() it\n", "See X, X it", ""),
        ("# SPDX-License-Identifier: Apache-2.0\nx = 1  # noqa: E501\n", "", ""),
        ("# A table:\n#\n#     what is\n#\n# ends.\n", "A table: ends.", ""),
        ("# Run this:\n# ```\n# what is\n# ```\n# once.\n", "Run this: once.", ""),
        ('"""Adds.\n\n>>> add(1)\nwhat is\n\nEnds."""\n', "Adds. Ends.", ""),
        ('"""A.\n\n    Example::\n\n        what is\n\n    End."""\n', "A. Example:: End.", ""),
        ('"""A.\n\nArgs:\n    x (int): The\n        x.\n"""\n', "A. Args: x (int): The x.", ""),
    ],
)
def test_prose_of_python(source: str, comments: str, printed: str) -> None:
    compile(source, "source", "exec")
    found = PROSE_OF_CODE.python_prose(source)
    assert (words(found.comments), words(found.printed)) == (comments, printed)


@pytest.mark.parametrize(
    ("source", "comments", "printed"),
    [
        ("// a line\n// and its next\nint x;  // another\n", "a line and its next | another", ""),
        ("/// For Doxygen.\nint x;  ///< The x.\n", "For Doxygen. | The x.", ""),
        ("int x; /* of\n * some lines */ int y; // z\n", "of some lines | z", ""),
        ("/** For\n  Doxygen. */\n", "For Doxygen.", ""),
        ('auto x = "// no comment at all";\n', "", "// no comment at all"),
        ('auto x = "/* no" " comment */ at all";\n', "", "/* no comment */ at all"),
        ('auto x = R"(one // two "three" four)";  // five\n', "five", 'one // two "three" four'),
        ('auto x = R"a(one )" /* two */ three)a";\n', "", 'one )" /* two */ three'),
        ("auto x = 1'000'000;  // a million\n", "a million", ""),
        ("f('\"');  // a quote\n  f('\\'');  // and \"one\"\n", 'a quote | and "one"', ""),
        ("auto x = a / b;  // divided\n", "divided", ""),
        ('fail("x must be ", y, "; got more than one");\n', "", "x must be | ; got more than one"),
        ('fail("one text in "  // why\n     "two parts");\n', "why", "one text in two parts"),
        ('f("short text", "of_a_name", "tcp://");\n', "", ""),
        ('#include "a/b.h"\n#include <c.h>  // for d\n', "for d", ""),
        ("}  // namespace penstock::net\n", "", ""),
        ("// Runs this:\n//\n//     what is\n//\n// once. NOLINT\n", "Runs this: once.", ""),
        ("// ``what is``, `what is`\n", "X, X", ""),
    ],
)
def test_prose_of_cpp(source: str, comments: str, printed: str) -> None:
    found = PROSE_OF_CODE.cpp_prose(source)
    assert (words(found.comments), words(found.printed)) == (comments, printed)


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("a.py", '"""A module.\n\nIt says so.\n"""\n', 3),
        ("a.py", "x = 1\n\n# One\n# says so.\n", 4),
        ("a.py", 'print(\n    "a text of "\n    f"{two} says so"\n)\n', 3),
        ("a.py", 'x = """\nThe text\nsays so.\n"""\n', 3),
        ("a.py", 'x = "a \\\n says so"\n', 2),
        ("a.py", '"""Has a ``name\nof two lines``.\n\nSays so."""\n', 4),
        ("a.cpp", "/*\n * One\n * says so.\n */\n", 3),
        ("a.h", "int x;  // of it\n        // says so.\n", 2),
        ("a.cu", 'auto x = R"(\none text\nsays so)";\n', 3),
        ("a.cpp", 'fail("a text "\n\n     "says so");\n', 3),
    ],
)
def test_hit_has_the_line_of_the_source(tmp_path: Path, name: str, source: str, line: int) -> None:
    [(pattern, found, text)] = hits(tmp_path, source, name)
    assert (pattern, found, text.lower()) == ("says, tells", line, "says")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.py", "x = 1  # know what\nlong = 2  # is it\n"),
        ("a.py", 'f("they know what", "is seen by it")\n'),
        ("a.cpp", 'f("they know what", "is seen by it");\n'),
        ("a.cpp", "// Know what\nint x;\n// is it\n"),
    ],
)
def test_pattern_is_not_found_across_two_texts(tmp_path: Path, name: str, source: str) -> None:
    assert hits(tmp_path, source, name) == []


@pytest.mark.slow
def test_python_is_split_as_by_tokenize_and_ast(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[tuple[str, int]] = set()

    class Recorder(PROSE_OF_CODE.Collector):
        def docstring(self, line: int, text: str) -> None:
            found.add(("docstring", line))

        def line_comment(self, line: int, column: int, text: str) -> None:
            found.add(("comment", line))

        def string(self, line: int, text: str) -> None:
            found.add(("string", line))

    monkeypatch.setattr(PROSE_OF_CODE, "Collector", Recorder)
    f_string = getattr(tokenize, "FSTRING_START", tokenize.STRING)  # of Python 3.12 and later
    package = PROSE.ROOT / "python" / "penstock"
    paths = [path for path in PROSE.code() if path.is_relative_to(package)]
    for path in paths:
        source = path.read_text(encoding="utf-8")
        found.clear()
        PROSE_OF_CODE.python_prose(source)
        docstrings = {
            node.value.lineno
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        expected = {("docstring", line) for line in docstrings}
        f_string_depth = 0
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            line = token.start[0]
            prefix = token.string.partition('"')[0].partition("'")[0].lower()
            if token.type == tokenize.COMMENT:
                expected.add(("comment", line))
            elif token.type in (tokenize.STRING, f_string) and f_string_depth == 0:
                if line not in docstrings and "b" not in prefix:
                    expected.add(("string", line))
            if f_string != tokenize.STRING:
                f_string_depth += token.type == f_string
                f_string_depth -= token.type == getattr(tokenize, "FSTRING_END", None)
        assert found == expected, path
    assert len(paths) > 100


def test_exceeded_bound_of_code_names_file_line_and_better_wording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.cpp"
    source.write_text('// It says\n// and tells.\nfail("it says how", "it told when");\n')
    assert PROSE.main([str(source)]) == 1
    *lines, printed = capsys.readouterr().out.splitlines()
    better = 'for example "the status says how many" -> "the status shows how many"'
    assert lines == [
        f'{source}:1: "says" (says, tells)',
        f'{source}:2: "tells" (says, tells)',
        "comments of these files: says, tells: 2 in 4 words, at most 1 allowed; " + better,
        f'{source}:3: "says" (says, tells)',
        f'{source}:3: "told" (says, tells)',
    ]
    assert printed == (
        "printed texts of these files: says, tells: 2 in 6 words, at most 1 allowed; " + better
    )


def test_figures_option_prints_a_line_per_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("It says so. " + "word " * 97, encoding="utf-8")
    assert PROSE.main(["--figures", str(page)]) == 0
    _, labels, bounds, figures = capsys.readouterr().out.splitlines()
    assert "what-clause" in labels
    assert bounds.split() == ["bound", *(f"{pattern.bound:g}" for pattern in PROSE.PATTERNS)]
    assert figures.split()[:8] == ["documents", "100", "0", "0.0", "0", "0.0", "1", "100.0"]


def test_hits_of_a_pattern_and_of_a_kind_are_listed_within_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.py"
    source.write_text("# It says what is.\nprint('the text says')\n")
    assert PROSE.main(["--list", "says", str(source)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{source}:1: It says what is. (says, tells)",
        f"{source}:2: the text says (says, tells)",
    ]
    assert PROSE.main(["--list", "says", "--kind", "printed", str(source)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert PROSE.main(["--room", "these files", str(source)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_unknown_room_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PROSE.main(["--room", "csrc/none", str(SCRIPT)])
    assert "no texts are in this room" in capsys.readouterr().err


def test_user_and_developer_documents_are_counted() -> None:
    names = {str(path.relative_to(PROSE.ROOT)) for path in PROSE.documents()}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/how-to/pools.md",
        "csrc/README.md",
        "csrc/net/README.md",
        "python/penstock/README.md",
    } <= names


def test_rooms_of_code_are_counted(tmp_path: Path) -> None:
    names = (
        "csrc/net/a.h",
        "python/penstock/a.pyi",
        "python/penstock/pool/b.py",
        "bench/workloads/c.py",
        "tests/conftest.py",
        "tests/python/d.py",
        "setup.py",
        "python/penstock/include/penstock/installed.h",
        "csrc/README.md",
    )
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    paths = PROSE.code(tmp_path)
    assert [PROSE.room(path, tmp_path) for path in paths] == [
        "bench",
        "csrc/net",
        "python/penstock",
        "python/penstock/pool",
        "setup.py",
        "tests",
        "tests/python",
    ]
    rooms = [(section.kind, section.room) for section in PROSE.sections(root=tmp_path)]
    assert ("comments", "tests/python") in rooms
    assert ("printed", "csrc/net") in rooms
    assert ("printed", "tests/python") not in rooms  # tests quote texts of the code


SECTION = PROSE.Section("comments", "csrc/net")


def counted(hit_count: int, listed: int) -> Any:
    hit = PROSE.Hit(Path("a.cpp"), 1, "says", "it says so")
    return PROSE.Count(SECTION, BY_NAME["says, tells"], (hit,) * hit_count, 20_000, listed)


def test_listed_hits_are_permitted_above_the_bound(tmp_path: Path) -> None:
    table = tmp_path / "bounds.txt"
    table.write_text("# A table.\n\ncomments csrc/net: says 3\n")
    assert PROSE.read_bounds(table) == {(SECTION, "says"): 3}
    assert not counted(3, listed=3).is_exceeded
    assert counted(4, listed=3).is_exceeded
    assert not counted(2, listed=0).is_exceeded
    assert counted(3, listed=0).is_exceeded


@pytest.mark.parametrize(
    "line", ["comments a", "texts csrc/net: says 3", "comments a: sais 3", "comments a: says"]
)
def test_unreadable_line_of_the_table_is_rejected(tmp_path: Path, line: str) -> None:
    table = tmp_path / "bounds.txt"
    table.write_text(f"# A table.\n{line}\n")
    with pytest.raises(ValueError, match=f'bounds.txt:2: must be .*, got "{line}"'):
        PROSE.read_bounds(table)


@pytest.mark.parametrize(
    ("hit_count", "listed", "figures"),
    [
        (5, 7, "comments csrc/net: says 5\n"),
        (7, 7, "comments csrc/net: says 7\n"),
        (9, 7, "comments csrc/net: says 7\n"),  # never raised
        (9, 0, ""),  # nor added
        (2, 7, ""),  # within the bound of the pattern
    ],
)
def test_listed_figures_are_only_lowered(hit_count: int, listed: int, figures: str) -> None:
    text = f"# A table.\n\ncomments csrc/net: says {listed}\n"
    assert PROSE.lowered(text, [counted(hit_count, listed)]) == f"# A table.\n\n{figures}"


@pytest.mark.parametrize(
    "counted",
    PROSE.count(PROSE.sections(PROSE.documents())),
    ids=lambda counted: counted.pattern.name,
)
def test_documents_keep_the_bounds(counted: Any) -> None:
    places = [f"{hit.path.relative_to(PROSE.ROOT)}:{hit.line}: {hit.text}" for hit in counted.hits]
    assert counted.rate <= counted.pattern.bound, places


@pytest.mark.slow
def test_code_keeps_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROSE.main([]) == 0, capsys.readouterr().out


def test_listed_figures_are_of_rooms_that_exist() -> None:
    rooms = {section.room for section, _ in PROSE.read_bounds()}
    assert [room for room in sorted(rooms) if not (PROSE.ROOT / room).exists()] == []
