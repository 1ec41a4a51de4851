# SPDX-License-Identifier: Apache-2.0
"""Which files of the repository are pages of the site, their places in it, and its navigation.

The navigation is `docs/README.md`: its headings are the groups, the links of its tables the
entries. So a page that is in the repository's index is in the site's, and there is one list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

HOME = "README.md"
CONTENTS = "docs/README.md"
# Pages of code folders, and their names in the site.
NAMED = {
    HOME: "index",
    CONTENTS: "contents",
    "bench/README.md": "benchmarks",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
}
# Written by `reference_pages.py`, so not in the repository's index. They open the group REFERENCE.
GENERATED = {
    "reference/python": "Python",
    "reference/cpp": "C++",
    "reference/commands": "Commands",
}
REFERENCE = "Reference"
PICTURES = (".svg", ".png")

_ENTRY = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\)")


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    entries: tuple[tuple[str, str], ...]  # the title and the name of each page


def page_name(path: str) -> str:
    """The name in the site, without an ending, of a file in the repository."""
    if path in NAMED:
        return NAMED[path]
    if not path.endswith(".md"):
        return f"source/{path}"
    bare = path.removesuffix(".md")
    if bare.startswith("docs/"):
        return bare.removeprefix("docs/")
    return f"code/{bare.removesuffix('/README')}"


def groups(contents: str) -> Iterator[Group]:
    """The navigation, of the text of `docs/README.md`."""
    title, entries = "", list[tuple[str, str]]()
    for line in [*contents.splitlines(), "## "]:
        if line.startswith("## "):
            if entries:
                yield Group(title, tuple(entries))
            title, entries = line.removeprefix("## "), []
            if title == REFERENCE:
                entries += [(text, name) for name, text in GENERATED.items()]
        elif entry := _ENTRY.match(line):
            entries.append((entry[1], page_name(resolved("docs", entry[2]))))


def resolved(folder: str, target: str) -> str:
    """The path in the repository of a link in a page of `folder`; ".." in front if it leads out."""
    parts: list[str] = []
    for part in PurePosixPath(folder, target).parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
