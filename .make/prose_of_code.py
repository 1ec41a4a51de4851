# SPDX-License-Identifier: Apache-2.0
"""Extracts the English of source files: comments, docstrings and printed texts of Python and C++.

A text has the layout of its file: every word is in the line that it has there, and the code is left
out. Names and addresses (`code`, URLs, the holes of f-strings) become "X". Comments and docstrings
are without the code that they quote: indented and fenced blocks, doctests.

Python is split by a regular expression, not by `tokenize` and `ast`: these take several times as
long, and split f-strings as the version of Python does that runs them. A test compares the two. A
string in the hole of an f-string must have other quotes than the f-string, as in Python 3.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PYTHON = frozenset({".py", ".pyi"})
CPP = frozenset({".cpp", ".cu", ".h"})

# Between two texts, so that no pattern is found across both.
END = " \N{PILCROW SIGN} "

PYTHON_TOKEN = re.compile(
    r"""
      (?P<code> [^\#"']+ )
    | \#(?P<comment> [^\n]* )
    | \"{3} (?P<double_block> (?: \\. | [^\\"] | "(?!"") )* ) \"{3}
    | '{3} (?P<single_block> (?: \\. | [^\\'] | '(?!'') )* ) '{3}
    | " (?P<double> (?: \\. | [^"\\\n] )* ) "
    | ' (?P<single> (?: \\. | [^'\\\n] )* ) '
    """,
    re.VERBOSE | re.DOTALL,
)
STRING_PREFIX = re.compile(r"(?<!\w)[bfru]{1,2}\Z", re.IGNORECASE)
CPP_TOKEN = re.compile(
    r"""
      [^"'/\dR]+
    | (?<!\w) \d (?: '?[\w.] )*  # not a character: 1'000
    | // [/!]* <? (?P<line_comment> [^\n]* )
    | /\* (?P<block_comment> .*? ) \*/
    | (?<!\w) R"(?P<fence> [^()\\\s]{0,16} )\( (?P<raw> .*? ) \)(?P=fence)"
    | " (?P<string> (?: \\. | [^"\\\n] )* ) "
    | ' (?: \\. | [^'\\\n] )+ '
    | .
    """,
    re.VERBOSE | re.DOTALL,
)

BLOCK_COMMENT_MARK = re.compile(r"^[*!]*<?|(?<=\n)[ \t]*\*")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
CALL = re.compile(r"\b[A-Za-z_][\w.:]*\(\)")
ADDRESS = re.compile(r"\b[a-z][a-z+.-]*://[^\s\"'<>)]*[^\s\"'<>).,;:?!]")
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|N\{[^}]*\}|[0-7]{1,3}|.)", re.DOTALL)
HOLE = re.compile(r"\{\{|\}\}|\{(?:[^{}]|\{[^{}]*\})*\}")
PRINTED_WORD = re.compile(r"(?<!\S)[\"'(]*[A-Za-z][A-Za-z'-]*[.,;:!?)\"']*(?!\S)")

# Lines for tools: the licence, the interpreter, directives for linters and type checkers.
FOR_TOOLS = re.compile(
    r"(?:SPDX-License-Identifier|!/|NOLINT|noqa\b|type: ignore|mypy:|ruff:|fmt:|pragma\b"
    r"|clang-format|^namespace\b).*"
)
INDENTED = re.compile(r" {4}|\t|[|>]")
FENCE = re.compile(r"\s*(?:```|~~~|[@\\](?:end)?code\b)")


@dataclass(frozen=True, slots=True)
class Prose:
    """The English of a source file."""

    comments: str  # and docstrings
    printed: str  # string literals that have a sentence or a part of one


class Page:
    """Puts texts in the lines that they have in their file."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._line = 1

    def add(self, line: int, text: str, is_continued: bool = False) -> None:
        """Add a text at its first line, separated from the last text unless it continues it."""
        if not is_continued:
            self._parts.append(END)
        self._parts += ["\n" * (line - self._line), text]
        self._line = line + text.count("\n")

    @property
    def text(self) -> str:
        return "".join(self._parts)


def blank(found: re.Match[str]) -> str:
    """Return "X" with the line breaks of the match."""
    return "X" + "\n" * found[0].count("\n")


def without_names(text: str) -> str:
    """Return the text with "X" for code spans, functions() and addresses."""
    return CALL.sub("X", ADDRESS.sub("X", CODE_SPAN.sub(blank, text)))


def comment_prose(lines: list[str]) -> str:
    """Return the prose of a comment, given without its marks."""
    kept = []
    is_fenced = False
    for line in lines:
        if FENCE.match(line):
            is_fenced = not is_fenced
            line = ""
        elif is_fenced or INDENTED.match(line):
            line = ""
        kept.append(FOR_TOOLS.sub("", line).strip())
    return without_names("\n".join(kept))


def docstring_prose(text: str) -> str:
    """Return the prose of a docstring: without doctests, and without blocks after "::"."""
    kept = []
    block_indent = None  # of the line that ends with "::", while its block lasts
    is_doctest = is_fenced = False
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            is_doctest = False
        elif block_indent is not None and indent <= block_indent:
            block_indent = None
        if line.lstrip().startswith(">>> "):
            is_doctest = True
        if FENCE.match(line):
            is_fenced = not is_fenced
            line = ""
        elif is_fenced or is_doctest or block_indent is not None:
            line = ""
        elif line.endswith("::"):
            block_indent = indent
        kept.append(line.strip())
    return without_names("\n".join(kept))


def string_text(text: str, prefix: str = "") -> str:
    """Return the text of a string literal, in the lines of its source."""

    def escaped(found: re.Match[str]) -> str:
        character = found[0][1]
        return character if character in "\"'\\\n" else " "

    def filled(found: re.Match[str]) -> str:
        return found[0][0] if found[0] in ("{{", "}}") else blank(found)

    if "r" not in prefix:
        text = ESCAPE.sub(escaped, text)
    return HOLE.sub(filled, text) if "f" in prefix else text


def is_printed(text: str) -> bool:
    """Return whether a string is a sentence, or a part of one: a space is at an end of it."""
    word_count = sum(1 for _ in PRINTED_WORD.finditer(text))
    return word_count >= 3 or (word_count > 0 and (text[:1] == " " or text[-1:] == " "))


class Collector:
    """Collects comments and strings; joins the lines of a comment and the parts of a string."""

    def __init__(self) -> None:
        self.comments = Page()
        self.printed = Page()
        self._comment: list[str] = []  # lines
        self._comment_line = 0
        self._comment_column = 0
        self._string: list[tuple[int, str]] = []  # parts, each with its line

    def line_comment(self, line: int, column: int, text: str) -> None:
        """Add a comment that ends with its line; one in the same column continues that above."""
        if line != self._comment_line + len(self._comment) or column != self._comment_column:
            self.end_comment()
            self._comment_line = line
            self._comment_column = column
        self._comment.append(text.removeprefix(" "))

    def block_comment(self, line: int, text: str) -> None:
        self.end_comment()
        lines = [one.removeprefix(" ") for one in text.split("\n")]
        self.comments.add(line, comment_prose(lines))

    def docstring(self, line: int, text: str) -> None:
        self.end_comment()
        self.end_string()
        self.comments.add(line, docstring_prose(text))

    def string(self, line: int, text: str) -> None:
        """Add a string literal; without code between, it continues the last one."""
        self._string.append((line, text))

    def end_comment(self) -> None:
        if self._comment:
            self.comments.add(self._comment_line, comment_prose(self._comment))
            self._comment = []

    def end_string(self) -> None:
        if self._string and is_printed("".join(text for _, text in self._string)):
            for index, (line, text) in enumerate(self._string):
                self.printed.add(line, without_names(text), is_continued=index > 0)
        self._string = []

    def end(self) -> Prose:
        self.end_comment()
        self.end_string()
        return Prose(self.comments.text, self.printed.text)


def column(source: str, at: int) -> int:
    return at - source.rfind("\n", 0, at)


def python_prose(source: str) -> Prose:
    """Extract the prose of a Python file."""
    collector = Collector()
    line = 1
    depth = 0  # of brackets
    is_start = True  # of a statement
    prefix = ""  # of the next string
    for token in PYTHON_TOKEN.finditer(source):
        kind = token.lastgroup
        assert kind is not None
        text = token[kind]
        if kind == "code":
            found = STRING_PREFIX.search(text)
            prefix = found[0].lower() if found else ""
            text = text.removesuffix(found[0]) if found else text
            if text and not text.isspace():
                collector.end_string()
            depth += sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
            before, is_new_line, after = text.rpartition("\n")
            is_start = depth == 0 and not after.strip() and not before.endswith("\\")
            is_start = is_start and (bool(is_new_line) or line == 1)
        elif kind == "comment":
            collector.line_comment(line, column(source, token.start()), text.lstrip("#"))
        else:
            text = string_text(text, prefix)
            if is_start:
                collector.docstring(line, text)
            elif "b" not in prefix:
                collector.string(line, text)
            is_start = False
            prefix = ""
        line += token[0].count("\n")
    return collector.end()


def cpp_prose(source: str) -> Prose:
    """Extract the prose of a C++ file."""
    collector = Collector()
    line = 1
    for token in CPP_TOKEN.finditer(source):
        kind = token.lastgroup
        if kind == "line_comment":
            collector.line_comment(line, column(source, token.start()), token[kind])
        elif kind == "block_comment":
            collector.block_comment(line, BLOCK_COMMENT_MARK.sub("", token[kind]))
        elif kind == "string":
            collector.string(line, string_text(token[kind]))
        elif kind == "raw":
            collector.string(line, token[kind])
        elif not token[0].isspace():
            collector.end_string()
        line += token[0].count("\n")
    return collector.end()


def source_prose(path: Path) -> Prose:
    """Extract the prose of a Python or C++ file."""
    source = path.read_text(encoding="utf-8")
    return python_prose(source) if path.suffix in PYTHON else cpp_prose(source)
