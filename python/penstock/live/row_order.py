# SPDX-License-Identifier: Apache-2.0
"""Which rows are shown, in which order, and the branches of a tree in front of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.live.top_rows import Row


@dataclass(frozen=True, slots=True)
class ShownRow:
    """``branch`` is drawn in front of the row's name."""

    row: Row
    branch: str = ""
    is_folded: bool = False


def sorted_rows(rows: Sequence[Row], column: str, is_descending: bool) -> list[Row]:
    """By numbers where the column has them, else by texts. What is not known comes last."""
    if not column:
        return list(rows)
    if any(column in row.keys for row in rows):
        known = [row for row in rows if column in row.keys]
        known.sort(key=lambda row: row.keys[column], reverse=is_descending)
        return known + [row for row in rows if column not in row.keys]
    return sorted(rows, key=lambda row: row.cells.get(column, "").lower(), reverse=is_descending)


def matcher(text: str) -> Callable[[Row], bool]:
    """Whether a row has the text in one of its cells, without regard to case. Of several texts with
    | between them one is enough."""
    wanted = [part.lower() for part in text.split("|") if part]

    def matches(row: Row) -> bool:
        if not wanted:
            return True
        cells = "\n".join(row.cells.values()).lower()
        return any(part in cells for part in wanted)

    return matches


def in_tree(
    rows: Sequence[Row], is_shown: Callable[[Row], bool], folded: Collection[str], in_ascii: bool
) -> list[ShownRow]:
    """Rows below their parents. A row that is to be shown brings the rows above it along, and a row
    whose parent is not there stands by itself."""
    by_id = {row.id: row for row in rows}
    below: dict[str | None, list[Row]] = {}
    kept: set[str] = set()
    for row in rows:
        parent = row.parent if row.parent in by_id else None
        below.setdefault(parent, []).append(row)
        place: Row | None = row if is_shown(row) else None
        while place is not None and place.id not in kept:
            kept.add(place.id)
            place = by_id.get(place.parent or "")
    between, last, through = ("|- ", "`- ", "|  ") if in_ascii else ("├─ ", "└─ ", "│  ")

    def walk(parent: str | None, indent: str) -> Iterator[ShownRow]:
        children = [row for row in below.get(parent, []) if row.id in kept]
        for place, row in enumerate(children):
            is_last = place + 1 == len(children)
            branch = "" if parent is None else indent + (last if is_last else between)
            is_folded = row.id in folded and row.id in below
            yield ShownRow(row, branch, is_folded)
            if not is_folded:
                more = "" if parent is None else indent + ("   " if is_last else through)
                yield from walk(row.id, more)

    return list(walk(None, ""))
