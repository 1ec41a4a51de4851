# SPDX-License-Identifier: Apache-2.0
"""Texts in the cells of a terminal: wide characters take two, combining ones none. Pure."""

from __future__ import annotations

import unicodedata


def cell_count(text: str) -> int:
    """How many cells of a terminal the text takes."""
    return len(text) if text.isascii() else sum(_cells_of(character) for character in text)


def cut(text: str, cells: int) -> str:
    """As much of the beginning as fits."""
    if text.isascii():
        return text[: max(cells, 0)]
    taken = 0
    for place, character in enumerate(text):
        taken += _cells_of(character)
        if taken > cells:
            return text[:place]
    return text


def fitted(text: str, cells: int, *, to_the_right: bool = False) -> str:
    """Exactly so many cells: cut, or filled with spaces."""
    short = cut(text, cells)
    spaces = " " * (cells - cell_count(short))
    return spaces + short if to_the_right else short + spaces


def _cells_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
