# SPDX-License-Identifier: Apache-2.0
"""Copies the pages of the repository to a folder from which Sphinx builds, with the site's links.

A page that is linked is a page of the site, wherever in the repository it lies. Any other file that
is linked, such as an example, gets a page that shows it; a folder one that lists its files. A
broken link is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from posixpath import dirname, relpath

from site_pages import CONTENTS, HOME, PICTURES, groups, page_name, resolved

LISTING_BYTES_MAX = 200_000
LEXERS = {
    ".py": "python",
    ".h": "cpp",
    ".cpp": "cpp",
    ".cu": "cpp",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".sh": "sh",
    ".css": "css",
    ".svg": "xml",
}
_FENCE = re.compile(r"^(```+|~~~+)")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.MULTILINE | re.DOTALL)


class BrokenLink(Exception):
    """A page has a link to a file that the repository does not have."""


class Staging:
    """The folder with the pages as Sphinx is to read them. Confined to one thread."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._files = tracked_files(root)
        self._wanted = [HOME, CONTENTS]
        self._wanted += sorted(
            path for path in self._files if path.startswith("docs/") and path.endswith(".md")
        )
        self._seen = set(self._wanted)

    def write(self) -> None:
        """Write all pages and the pages that they link to. Raises BrokenLink."""
        shutil.rmtree(self._folder, ignore_errors=True)
        in_navigation = {name for group in self._groups() for _, name in group.entries}
        while self._wanted:
            path = self._wanted.pop()
            name = page_name(path)
            text = self._text_of(path)
            if path == HOME:
                text += self._navigation()
            elif name not in in_navigation:
                text = f"---\norphan: true\n---\n\n{text}"
            write_text(self._folder / f"{name}.md", text)

    def _groups(self) -> list:
        return list(groups((self._root / CONTENTS).read_text(encoding="utf-8")))

    def _navigation(self) -> str:
        parts = []
        for group in self._groups():
            lines = [f"{title} <{name}>" for title, name in group.entries]
            heading = ["```{toctree}", ":hidden:", f":caption: {group.title}", ""]
            parts.append("\n".join([*heading, *lines, "```", ""]))
        return "\n" + "\n".join(parts)

    def _text_of(self, path: str) -> str:
        if path.endswith(".md"):
            text = (self._root / path).read_text(encoding="utf-8")
            return with_links(_COMMENT.sub("", text), lambda link: self._turned(path, link))
        if (self._root / path).is_dir():
            return self._folder_page(path)
        return self._listing(path)

    def _turned(self, page: str, link: str) -> str:
        """The link as the site has it."""
        if "://" in link or link.startswith(("#", "mailto:")):
            return link
        target, _, anchor = link.partition("#")
        path = resolved(dirname(page), target)
        if path.endswith(PICTURES):
            return self._picture(page, path, link)
        if f"{path}/README.md" in self._files:
            path = f"{path}/README.md"
        if path not in self._files and not self._in_folder(path):
            raise BrokenLink(f"{page} links to {link}, but the repository has no {path}")
        if path not in self._seen:
            self._seen.add(path)
            self._wanted.append(path)
        target = relpath(page_name(path), dirname(page_name(page)) or ".") + ".md"
        return f"{target}#{anchor}" if anchor and path.endswith(".md") else target

    def _picture(self, page: str, path: str, link: str) -> str:
        if path not in self._files:
            raise BrokenLink(f"{page} shows {link}, but the repository has no {path}")
        name = f"pictures/{Path(path).name}"
        (self._folder / "pictures").mkdir(parents=True, exist_ok=True)
        shutil.copy(self._root / path, self._folder / name)
        return relpath(name, dirname(page_name(page)) or ".")

    def _in_folder(self, path: str) -> list[str]:
        return sorted(one for one in self._files if one.startswith(f"{path}/"))

    def _folder_page(self, path: str) -> str:
        rows = [
            f"- [`{relpath(one, path)}`]({self._turned(f'{path}/README.md', relpath(one, path))})"
            for one in self._in_folder(path)
            if (self._root / one).stat().st_size <= LISTING_BYTES_MAX
        ]
        # The links above are relative to a page in the folder; this page is in its parent.
        base = dirname(page_name(f"{path}/README.md")) or "."
        here = dirname(page_name(path))
        text = f"# `{path}`\n\n" + "\n".join(rows) + "\n"
        return with_links(text, lambda link: relpath(f"{base}/{link}", here))

    def _listing(self, path: str) -> str:
        text = (self._root / path).read_text(encoding="utf-8").rstrip("\n")
        lexer = LEXERS.get(
            Path(path).suffix, "cmake" if path.endswith("CMakeLists.txt") else "none"
        )
        fence = "`" * 8
        return f"# `{path}`\n\n{fence}{lexer}\n{text}\n{fence}\n"


def with_links(text: str, turn: Callable[[str], str]) -> str:
    """The text with each link outside of code fences turned."""
    lines = []
    fence = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and line.startswith(fence):
            fence = ""
        elif not fence and not line.startswith("    "):
            line = _LINK.sub(lambda link: link[1] + turn(link[2]) + link[3], line)
        lines.append(line)
    return "".join(lines)


def tracked_files(root: Path) -> frozenset[str]:
    """Return the files of the repository, new ones too; without git, all but built ones."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        names = listed.stdout.split("\0")
        return frozenset(name for name in names if name and (root / name).is_file())
    found = set[str]()
    for folder, folders, names in os.walk(root):
        folders[:] = [one for one in folders if not one.startswith(".") and one != "build"]
        found |= {(Path(folder) / name).relative_to(root).as_posix() for name in names}
    return frozenset(found)


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
