# SPDX-License-Identifier: Apache-2.0
"""The files that browsers get from a dashboard: those of the folder `pages`, read once."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str


def page_files() -> dict[str, PageFile]:
    """By path. Nothing else of the disk can be asked for."""
    found = {}
    for file in files("penstock.live").joinpath("pages").iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            found[f"/{file.name}"] = PageFile(file.read_bytes(), _TYPES[kind])
    found["/"] = found["/index.html"]
    return found
