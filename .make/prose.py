# SPDX-License-Identifier: Apache-2.0
"""Counts patterns of unidiomatic English in the documents, so that they do not return.

usage: prose.py [--figures] [FILE ...]

Each pattern has a bound per 10,000 words, for all documents together: single uses are fine, habits
are not. If a pattern exceeds its bound, every hit is printed as `file:line` with an example of
better wording, and the exit code is 1. `--figures` prints the count of every pattern, too. With
files as arguments, the bounds hold for these instead of for the documents of the project.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "csrc/**/README.md",
    "python/penstock/README.md",
)
PER_WORDS = 10_000

FENCE = re.compile(r"[ ]*(?:```|~~~)")
# Indented code, tables, quoted output, HTML, and definitions of link targets.
NOT_PROSE = re.compile(r"(?: {4}|\t|\||>|<|\[[^\]]+\]: )")
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK_TARGET = re.compile(r"\]\([^)\s]*\)")
WORD = re.compile(r"[A-Za-z']+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A habit to avoid. A space in `expression` also matches a line break."""

    name: str
    expression: str
    instead: str  # an example of the pattern and of better wording
    bound: float  # hits per 10,000 words

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Return the matches in `text`, in any case of letters."""
        return re.finditer(self.expression.replace(" ", r"\s+"), text, re.IGNORECASE)


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


@dataclass(frozen=True, slots=True)
class Count:
    """The uses of one pattern in all documents."""

    pattern: Pattern
    hits: tuple[Hit, ...]
    word_count: int  # of all documents

    @property
    def rate(self) -> float:
        """Return the hits per 10,000 words; 0 without any words."""
        return PER_WORDS * len(self.hits) / max(self.word_count, 1)

    @property
    def is_exceeded(self) -> bool:
        return self.rate > self.pattern.bound


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


def count(paths: Iterable[Path], patterns: Sequence[Pattern] = PATTERNS) -> list[Count]:
    """Count the patterns in the prose of these files, in the order of the patterns."""
    texts = [(path, prose(path.read_text(encoding="utf-8"))) for path in paths]
    word_count = sum(len(WORD.findall(text)) for _, text in texts)
    counts = []
    for pattern in patterns:
        hits = [
            Hit(path, text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()))
            for path, text in texts
            for found in pattern.find(text)
        ]
        counts.append(Count(pattern, tuple(hits), word_count))
    return counts


def shown(path: Path) -> Path:
    """Return the path relative to the project, where it is in it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the hits of the patterns that exceed their bounds; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Count patterns of unidiomatic English.")
    parser.add_argument("--figures", action="store_true", help="print the count of every pattern")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="Markdown files")
    options = parser.parse_args(arguments)

    is_exceeded = False
    for counted in count(options.files or documents()):
        pattern = counted.pattern
        if counted.is_exceeded:
            is_exceeded = True
            for hit in counted.hits:
                print(f'{shown(hit.path)}:{hit.line}: "{hit.text}" ({pattern.name})')
        if counted.is_exceeded or options.figures:
            print(
                f"{pattern.name}: {counted.rate:.1f} per {PER_WORDS:,} words, at most "
                f"{pattern.bound:g} allowed; for example {pattern.instead}"
            )
    return 1 if is_exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
