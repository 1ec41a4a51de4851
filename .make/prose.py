# SPDX-License-Identifier: Apache-2.0
"""Counts patterns of unidiomatic English in documents and code, so that they do not return.

usage: prose.py [--figures] [--list PATTERN] [--kind KIND] [--room ROOM] [--lower] [FILE ...]

Each pattern has a bound per 10,000 words: single uses are fine, habits are not. A bound holds for
all documents together and for each room of the code (a folder such as csrc/net or tests/python),
in which comments (with docstrings) and printed texts are counted separately. Printed texts of tests
are not counted, because they quote texts of the code. `.make/prose_bounds.txt` permits the hits
that older texts have above the bounds.

If a bound is exceeded, every hit is printed as `file:line` with an example of better wording, and
the exit code is 1. `--figures` prints all counts; `--list` and `--room` print hits whether or not
they are within the bounds; `--lower` lowers the figures of `.make/prose_bounds.txt` to the present
ones. With files as arguments, the bounds hold for these together.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prose_of_code import CPP, END, PYTHON, source_prose

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = ROOT / ".make" / "prose_bounds.txt"
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "csrc/**/README.md",
    "python/penstock/README.md",
    "python/penstock/.agents/skills/penstock/SKILL.md",
    "simulator/README.md",
)
# The folders of code, and how many names of a path make its room.
CODE = {
    ".make": 1,
    "bench": 1,
    "csrc": 2,
    "docs/site": 2,
    "examples": 1,
    "python/penstock": 3,
    "setup.py": 1,
    "simulator": 1,
    "tests": 2,
}
# Made by builds and runs; and this file, which quotes the patterns.
NOT_COUNTED = (
    "python/penstock/include",
    "python/penstock/lib",
    "examples/out",
    "bench/out",
    ".make/prose.py",
)
KINDS = ("documents", "comments", "printed")
PER_WORDS = 10_000
CONTEXT = 60  # characters of text that are shown before and after a hit

FENCE = re.compile(r"[ ]*(?:```|~~~)")
# Indented code, tables, quoted output, HTML, and definitions of link targets.
NOT_PROSE = re.compile(r"(?: {4}|\t|\||>|<|\[[^\]]+\]: )")
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK_TARGET = re.compile(r"\]\([^)\s]*\)")
WORD = re.compile(r"[A-Za-z']+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A habit to avoid. A space in an expression also matches a line break."""

    name: str
    expression: str
    instead: str  # an example of the pattern and of better wording
    bound: float  # hits per 10,000 words
    usual: str = r"(?!)"  # phrases with these words that are idiomatic

    @property
    def label(self) -> str:
        """Return the start of the name, for tables."""
        return self.name.partition(",")[0]

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Return the matches in `text`, in any case of letters, that are in no usual phrase."""
        usual = None
        for found in re.finditer(spaced(self.expression), text, re.IGNORECASE):
            if usual is None:
                usual = [one.span() for one in re.finditer(spaced(self.usual), text, re.IGNORECASE)]
            if not any(start <= found.start() < end for start, end in usual):
                yield found


def spaced(expression: str) -> str:
    return expression.replace(" ", r"\s+")


PATTERNS = (
    Pattern(
        "what-clause",
        r"\bwhat (?:is|are|was|were|it|they|a|an|the|that|this|he|you|has|have|had|comes|goes|one"
        r"|each|its|their|no|nobody|others)\b",
        '"what the server has read" -> "the data read by the server"',
        3,
    ),
    Pattern(
        "comes, goes",
        r"\b(?:comes?|goes|came|went|going on|go on)\b",
        '"the batch comes from a worker" -> "a worker sends the batch"',
        7,
        r"\b(?:comes?|goes|came|went) (?:through|with|up|down|first|last|wrong|out of scope"
        r"|to std(?:in|out|err))\b",
    ),
    Pattern(
        "says, tells",
        r"\b(?:says?|tells?|told|said)\b",
        '"the status says how many" -> "the status shows how many"',
        1,
    ),
    Pattern(
        "nobody, somebody, nothing",
        r"\b(?:nobody|somebody|nothing)\b",
        '"nothing is sent" -> "no data is sent"',
        2,
        r"\b(?:do|does|did|doing|costs?|means?|returns?|raises?) nothing\b"
        r"|\bnothing (?:else )?to \w+|\bnothing (?:but|happens)\b",
    ),
    Pattern(
        "of its own",
        r"\b(?:of (?:its|their|your|his|our) own|\w+'s? own)\b",
        '"a process of its own" -> "a separate process"',
        1,
    ),
    Pattern(
        "those that, that of",
        r"\b(?:those (?:that|of|with|who|which|in|for|without)|that of)\b",
        '"the id is that of the job" -> "the id is the job\'s id"',
        2,
    ),
    Pattern(
        "begins",
        r"\b(?:begins?|began|begun|beginning)\b",
        '"the epoch begins" -> "the epoch starts"',
        1.5,
        r"\b(?:at|from) the beginning\b",
    ),
    Pattern(
        "beside",
        r"\bbesides?\b",
        '"torch 2.15 beside 2.11" -> "torch 2.15 in addition to 2.11"',
        1,
    ),
    Pattern(
        "to the bit",
        r"\bto the bit\b",
        '"the same to the bit" -> "bit-for-bit identical"',
        1,
    ),
    Pattern(
        "unusual word",
        r"\b(?:anew|whichever|whoever|whatever|heed(?:s|ed)?|mend(?:s|ed)?|befall\w*|lent|lends?"
        r"|owes?|owed)\b",
        '"starts the workers anew" -> "restarts the workers"',
        1,
    ),
)


@dataclass(frozen=True, slots=True)
class Hit:
    """One use of a pattern."""

    path: Path
    line: int  # from 1
    text: str
    context: str  # the text with some words around it


@dataclass(frozen=True, slots=True, order=True)
class Section:
    """Texts that have bounds together."""

    kind: str  # of KINDS
    room: str

    def __str__(self) -> str:
        if self.kind == self.room:
            return self.kind
        return f"{'printed texts' if self.kind == 'printed' else self.kind} of {self.room}"


# Files with their prose, as prose() returns it.
Texts = Sequence[tuple[Path, str]]
Listed = Mapping[tuple[Section, str], int]


@dataclass(frozen=True, slots=True)
class Count:
    """The uses of one pattern in a section."""

    section: Section
    pattern: Pattern
    hits: tuple[Hit, ...]
    word_count: int  # of the section
    listed: int = 0  # hits that prose_bounds.txt permits

    @property
    def rate(self) -> float:
        """Return the hits per 10,000 words; 0 without any words."""
        return PER_WORDS * len(self.hits) / max(self.word_count, 1)

    @property
    def target(self) -> int:
        """Return the number of hits that the pattern's bound permits: at least one."""
        return max(int(self.pattern.bound * self.word_count / PER_WORDS), 1)

    @property
    def allowed(self) -> int:
        return max(self.target, self.listed)

    @property
    def is_exceeded(self) -> bool:
        return len(self.hits) > self.allowed

    @property
    def summary(self) -> str:
        return (
            f"{self.section}: {self.pattern.name}: {len(self.hits)} in {self.word_count:,} words, "
            f"at most {self.allowed} allowed; for example {self.pattern.instead}"
        )


def prose(text: str) -> str:
    """Return the prose of a Markdown text, line by line: other lines are empty.

    Code spans become "X", and the targets of links are left out, so that names and addresses do not
    count.
    """
    lines = []
    is_fenced = False
    for line in text.splitlines():
        if FENCE.match(line):
            is_fenced = not is_fenced
            line = ""
        elif is_fenced or NOT_PROSE.match(line):
            line = ""
        lines.append(LINK_TARGET.sub("]", CODE_SPAN.sub("X", line)))
    return "\n".join(lines)


def documents(root: Path = ROOT) -> list[Path]:
    """Return the documents that the bounds hold for, sorted by name."""
    return sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})


def code(root: Path = ROOT) -> list[Path]:
    """Return the files of code that the bounds hold for, sorted by name."""
    left_out = [root / name for name in NOT_COUNTED]
    paths = []
    for name in CODE:
        top = root / name
        paths += [top] if top.is_file() else top.rglob("*.*")
    return sorted(
        path
        for path in paths
        if path.suffix in PYTHON | CPP
        and path.is_file()
        and not any(path.is_relative_to(one) for one in left_out)
    )


def room(path: Path, root: Path = ROOT) -> str:
    """Return the room of a file of code: its folder, or its own name in the folder of the project.

    Files directly in a folder of rooms, such as tests/conftest.py, have this folder as their room.
    """
    relative = path.relative_to(root)
    top = next(name for name in CODE if relative.is_relative_to(name))
    return "/".join(relative.parts[:-1][: CODE[top]]) or relative.name


def sections(files: Sequence[Path] = (), root: Path = ROOT) -> dict[Section, Texts]:
    """Return the texts of the project, or of these files as one room, by section."""
    found: dict[Section, list[tuple[Path, str]]] = {}
    for path in files or documents(root):
        if path.suffix not in PYTHON | CPP:
            section = Section("documents", "documents")
            text = prose(path.read_text(encoding="utf-8"))
            found.setdefault(section, []).append((path, text))
    for path in files or code(root):
        if path.suffix in PYTHON | CPP:
            name = "these files" if files else room(path, root)
            texts = source_prose(path)
            found.setdefault(Section("comments", name), []).append((path, texts.comments))
            if not name.startswith("tests"):
                found.setdefault(Section("printed", name), []).append((path, texts.printed))
    return {section: found[section] for section in sorted(found, key=place)}


def place(section: Section) -> tuple[int, str]:
    return KINDS.index(section.kind), section.room


def hit(path: Path, text: str, found: re.Match[str]) -> Hit:
    start, end = found.span()
    before = text[max(start - CONTEXT, 0) : start].rpartition(END)[2]
    after = text[end : end + CONTEXT].partition(END)[0]
    context = " ".join((before + found[0] + after).split())
    return Hit(path, text.count("\n", 0, start) + 1, " ".join(found[0].split()), context)


def count(
    texts: Mapping[Section, Texts],
    listed: Listed | None = None,
    patterns: Sequence[Pattern] = PATTERNS,
) -> list[Count]:
    """Count the patterns in each section, in the order of the patterns."""
    counts = []
    for section, section_texts in texts.items():
        word_count = sum(len(WORD.findall(text)) for _, text in section_texts)
        for pattern in patterns:
            hits = tuple(
                hit(path, text, found)
                for path, text in section_texts
                for found in pattern.find(text)
            )
            permitted = (listed or {}).get((section, pattern.label), 0)
            counts.append(Count(section, pattern, hits, word_count, permitted))
    return counts


def read_bounds(path: Path = BOUNDS) -> dict[tuple[Section, str], int]:
    """Read the hits that are permitted above the bounds, by section and label of the pattern.

    Raises:
        ValueError: A line is not "KIND ROOM: PATTERN HITS".
    """
    labels = {pattern.label for pattern in PATTERNS}
    listed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        heading, _, entry = line.partition(": ")
        kind, _, name = heading.partition(" ")
        label, _, hits = entry.rpartition(" ")
        if kind not in KINDS or label not in labels or not hits.isdecimal():
            raise ValueError(
                f'{shown(path)}:{number}: must be "KIND ROOM: PATTERN HITS", got "{line}"'
            )
        listed[Section(kind, name), label] = int(hits)
    return listed


def lowered(text: str, counts: Iterable[Count]) -> str:
    """Return the text of prose_bounds.txt with its figures lowered to the hits of `counts`.

    Figures within the bound of their pattern are left out.
    """
    lines = [line for line in text.splitlines() if line.startswith("#") or not line.strip()]
    for counted in counts:
        hits = min(len(counted.hits), counted.listed)
        if hits > counted.target:
            section = counted.section
            lines.append(f"{section.kind} {section.room}: {counted.pattern.label} {hits}")
    return "\n".join(lines) + "\n"


def shown(path: Path) -> Path:
    """Return the path relative to the project, where it is in it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def print_figures(counts: Sequence[Count]) -> None:
    """Print a table: for each section and kind the words, and per pattern the hits and the rate."""
    patterns = {counted.pattern.label: counted.pattern for counted in counts}.values()
    print(f"Hits, and hits per {PER_WORDS:,} words; + above the bound of the pattern")
    print(f"{'':46}{'words':>8}" + "".join(f"{pattern.label:>15}" for pattern in patterns))
    print(f"{'bound':54}" + "".join(f"{pattern.bound:>14g} " for pattern in patterns))
    for kind in KINDS:
        lines: dict[Section, list[Count]] = {}
        for counted in counts:
            if counted.section.kind == kind:
                lines.setdefault(counted.section, []).append(counted)
        if len(lines) > 1:
            lines[Section(kind, "all rooms")] = [
                total(same) for same in zip(*lines.values(), strict=True)
            ]
        for section, line in lines.items():
            cells = [
                f"{len(one.hits):>7} {one.rate:>6.1f}{'+' if len(one.hits) > one.target else ' '}"
                for one in line
            ]
            print(f"{section!s:46}{line[0].word_count:>8,}{''.join(cells)}".rstrip())


def total(counts: Sequence[Count]) -> Count:
    """Return the uses of one pattern in several sections."""
    hits = tuple(one for counted in counts for one in counted.hits)
    word_count = sum(counted.word_count for counted in counts)
    return Count(counts[0].section, counts[0].pattern, hits, word_count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the hits of the patterns that exceed their bounds; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Count patterns of unidiomatic English.")
    parser.add_argument("--figures", action="store_true", help="print all counts")
    parser.add_argument(
        "--list",
        metavar="PATTERN",
        choices=[pattern.label for pattern in PATTERNS],
        help="print the hits of a pattern: " + ", ".join(pattern.label for pattern in PATTERNS),
    )
    parser.add_argument("--kind", choices=KINDS, help="count only texts of this kind")
    parser.add_argument("--room", help="print the hits of a room, such as csrc/net")
    parser.add_argument("--lower", action="store_true", help=f"lower the figures of {BOUNDS.name}")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="Markdown, Python, C++")
    options = parser.parse_args(arguments)

    texts = {
        section: section_texts
        for section, section_texts in sections(options.files).items()
        if options.kind in (None, section.kind) and options.room in (None, section.room)
    }
    if not texts:
        parser.error("no texts are in this room; --figures lists the rooms")
    counts = count(texts, {} if options.files else read_bounds())
    if options.lower:
        if options.files or options.kind or options.room:
            parser.error("--lower must be used without files, --kind and --room")
        BOUNDS.write_text(lowered(BOUNDS.read_text(encoding="utf-8"), counts), encoding="utf-8")
        return 0
    if options.list or options.room:
        for counted in counts:
            if options.list in (None, counted.pattern.label):
                for one in counted.hits:
                    print(f"{shown(one.path)}:{one.line}: {one.context} ({counted.pattern.name})")
        return 0
    if options.figures:
        print_figures(counts)
    exceeded = [counted for counted in counts if counted.is_exceeded]
    for counted in exceeded:
        for one in counted.hits:
            print(f'{shown(one.path)}:{one.line}: "{one.text}" ({counted.pattern.name})')
        print(counted.summary)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
