# SPDX-License-Identifier: Apache-2.0
"""The code of the user pages, as run by the tests.

Code blocks are run as a reader would run them, in the order of the page: the Python blocks as one
program, the C++ blocks as one file that is compiled, and commands if marked. An invisible comment
in front of a block changes this:

    <!-- snippet: not run, because REASON -->   the block is only compiled
    <!-- snippet: file NAME -->                 the block is a file, for the commands of the page
    <!-- snippet: run -->                       the commands of this block are run, by bash
    <!-- snippet: run on slurm -->              the same with a cluster; or `on ray`, with its
                                                address in RAY_ADDRESS
    <!-- snippet: declarations -->              C++ that stays outside of a function

Code that a page leaves to the reader is in a separate comment, `<!-- snippet: hidden python`, in
the lines up to `-->`. The same holds for `hidden cpp`, which belongs to the next block of C++, and
for `hidden declarations`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The guide for coding assistants, which is installed with the package.
GUIDE = ROOT / "python" / "penstock" / ".agents" / "skills" / "penstock" / "SKILL.md"

RUN = ("run", "run on slurm", "run on ray")

_MARK = re.compile(r"<!-- snippet: (?P<text>.*?) ?-->", re.DOTALL)
_NOT_RUN = "not run, because "
_PROMPT = re.compile(r"^(?:[a-z]+)?\$ +")


@dataclass(frozen=True, slots=True)
class Snippet:
    language: str  # of the block; "python", "cpp" or "declarations" for hidden code
    code: str
    line: int  # the number of the first line of the code on its page
    marks: tuple[str, ...] = ()
    is_hidden: bool = False

    @property
    def reason_not_run(self) -> str | None:
        found = (mark for mark in self.marks if mark.startswith(_NOT_RUN))
        return next((mark.removeprefix(_NOT_RUN) for mark in found), None)

    @property
    def file_name(self) -> str | None:
        found = (mark for mark in self.marks if mark.startswith("file "))
        return next((mark.removeprefix("file ") for mark in found), None)


def pages() -> list[Path]:
    """Return the user pages. Other tests cover the pages next to the code."""
    return [ROOT / "README.md", GUIDE, *sorted((ROOT / "docs").rglob("*.md"))]


def snippets_of(page: Path) -> list[Snippet]:
    """Return all snippets of a page. Raises ValueError for a mark that is unknown or not in front
    of a block."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Snippet] = []
    marks: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("<!-- snippet:"):
            end = next(k for k in range(at, len(lines)) if lines[k].endswith("-->"))
            mark = _MARK.fullmatch("\n".join(lines[at : end + 1]))
            assert mark is not None, f"{page}:{at + 1}: {line}"
            text = mark["text"].strip()
            if text.startswith("hidden "):
                language, _, code = text.removeprefix("hidden ").partition("\n")
                found.append(Snippet(language, code + "\n", at + 2, is_hidden=True))
            else:
                marks.append(" ".join(text.split()))
            at = end
        elif line.startswith("```"):
            end = next(k for k in range(at + 1, len(lines)) if lines[k].startswith("```"))
            code = "".join(f"{one}\n" for one in lines[at + 1 : end])
            found.append(Snippet(line.removeprefix("```"), code, at + 2, tuple(marks)))
            marks = []
            at = end
        elif line and marks:
            raise ValueError(f"{page}:{at + 1}: a fence is expected behind {marks}, not {line!r}")
        at += 1
    for snippet in found:
        _check(page, snippet)
    return found


def _check(page: Path, snippet: Snippet) -> None:
    known = (*RUN, "declarations")
    for mark in snippet.marks:
        if mark not in known and not mark.startswith((_NOT_RUN, "file ")):
            raise ValueError(f"{page}:{snippet.line}: there is no mark {mark!r}")
    if snippet.is_hidden and snippet.language not in ("python", "cpp", "declarations"):
        raise ValueError(f"{page}:{snippet.line}: hidden {snippet.language!r} is not known")


def program_of(snippets: list[Snippet], prelude: str) -> str | None:
    """Return the Python code of a page as one program, each line at its line number on the page;
    None for a page without any. `prelude` replaces the first line of the page, its heading."""
    blocks = [
        one
        for one in snippets
        if one.language == "python" and one.reason_not_run is None and one.file_name is None
    ]
    if not blocks:
        return None
    lines = [prelude]
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def cpp_of(snippets: list[Snippet]) -> str | None:
    """Return the C++ code of a page as one file. Each block of statements is a function. `...`
    stands for the reader's code and is left out."""
    includes = ["#include <penstock/penstock.h>", "#include <torch/torch.h>", "#include <fstream>"]
    parts: list[str] = []
    before: list[str] = []
    count = 0
    for one in snippets:
        if one.is_hidden and one.language == "declarations":
            parts.append(one.code)
        elif one.is_hidden and one.language == "cpp":
            before.append(one.code)
        elif one.language == "cpp" and one.reason_not_run is None and one.file_name is None:
            lines = one.code.splitlines()
            includes += [line for line in lines if line.startswith("#include")]
            code = "\n".join(line for line in lines if not line.startswith("#include"))
            code = re.sub(r"(?<![\w.])\.\.\.(?![\w.])", "", code)
            if "declarations" in one.marks:
                parts.append(code)
            else:
                count += 1
                parts.append(
                    f"[[maybe_unused]] void snippet_{count}() {{\n{''.join(before)}{code}\n}}"
                )
                before = []
    if not parts:
        return None
    return "\n".join([*dict.fromkeys(includes), *parts, "int main() {}", ""])


def commands_in(snippet: Snippet) -> Iterator[str]:
    """Return the commands of a block: of `console` the lines after a prompt, of `sh` all. A
    backslash at the end joins a line to the next."""
    if snippet.language not in ("console", "sh"):
        return
    text = snippet.code.replace("\\\n", " ")
    for line in text.splitlines():
        if snippet.language == "console":
            prompt = _PROMPT.match(line)
            if prompt is None:
                continue
            line = line[prompt.end() :]
        if line.strip():
            yield line


def penstock_arguments(command: str) -> list[list[str]]:
    """Return the arguments of each call of penstock in a command, its name first: "penstock" or
    "penstock-worker". Empty for a command without calls."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    calls: list[list[str]] = []
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= set("();<>|&"):
            calls.append(words)
            words = []
        else:
            words.append(word)
    return [call for words in calls if (call := _of_penstock(words))]


def _of_penstock(words: list[str]) -> list[str]:
    for index, word in enumerate(words):
        if word in ("penstock", "penstock-worker"):
            is_module = index > 0 and words[index - 1] == "-m"
            follows = index == 0 or is_module or "=" in words[index - 1] or "--" in words
            if follows or words[index - 1].startswith("--no-python"):
                return words[index:]
    return []
