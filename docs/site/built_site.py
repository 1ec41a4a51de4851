# SPDX-License-Identifier: Apache-2.0
"""Checks the HTML of a built site: every link leads to a page and a place in it, and no page loads
files from other hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

# Attributes by which a browser loads something without being asked.
_LOADING = {
    ("img", "src"),
    ("script", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("video", "src"),
    ("audio", "src"),
    ("object", "data"),
    ("embed", "src"),
    ("link", "href"),
    ("image", "href"),
    ("use", "href"),
}
_EXTERNAL = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_CSS_LOADS = re.compile(
    r"""(?:url\(\s*|@import\s+)["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE
)
# Of links into Doxygen's pages only the files are looked for.
WITHOUT_PLACES = "cpp"


@dataclass(slots=True)
class Page:
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.page.ids.add(value)
            if value is None:
                continue
            if (tag, name) in _LOADING:
                self.page.loads.append(value)
            elif tag == "a" and name == "href":
                self.page.links.append(value)
            elif name == "style":
                self.page.loads += _CSS_LOADS.findall(value)


def read_pages(site: Path) -> dict[Path, Page]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        reader = _Reader()
        text = path.read_text(encoding="utf-8")
        reader.feed(text)
        reader.page.loads += _CSS_LOADS.findall(text)
        pages[path] = reader.page
    return pages


def external_resources(site: Path) -> list[str]:
    """Return the addresses on other hosts that pages and style sheets make a browser fetch."""
    found = []
    for path, page in read_pages(site).items():
        found += [f"{path.relative_to(site)}: {one}" for one in page.loads if _EXTERNAL.match(one)]
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(site)}: {one}" for one in _CSS_LOADS.findall(text)]
    return found


def broken_links(site: Path) -> list[str]:
    pages = read_pages(site)
    found = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            if not _is_resolved(site, pages, path, link):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def _is_resolved(site: Path, pages: dict[Path, Page], path: Path, link: str) -> bool:
    if _EXTERNAL.match(link) or link.startswith(("mailto:", "javascript:", "data:")):
        return True
    target, place = urldefrag(link)
    target = unquote(target.partition("?")[0])
    file = (path.parent / target).resolve() if target else path
    if file.is_dir():
        file /= "index.html"
    if not file.is_file() or not file.is_relative_to(site.resolve()):
        return False
    if not place or file not in pages or file.is_relative_to(site.resolve() / WITHOUT_PLACES):
        return True
    return unquote(place) in pages[file].ids
