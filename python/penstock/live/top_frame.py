# SPDX-License-Identifier: Apache-2.0
"""One frame of `penstock top`: lines of styled text that fit a terminal of any size, where wide
characters take two cells and combining ones none, and a frame as plain text for output without a
terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock._version import __version__
from penstock.live.pool_view import WORKER_STATES, EngineView, PoolView
from penstock.live.top_rows import TABLES, ShownRow, Table, byte_rate, rate_text, share
from penstock.live.top_state import Menu, TopState

# Styles, which the terminal module maps to colours or, without colours, to bold and reverse.
STYLES = (
    "",
    "title",
    "head",
    "selected",
    "tagged",
    "good",
    "warn",
    "bad",
    "dim",
    "key",
    "bar",
    "tab",
)

_GAP = "  "
_KEYS = (
    ("F1", "Help"), ("F3", "Search"), ("F4", "Filter"), ("F5", "Tree"), ("F6", "SortBy"),
    ("Tab", "Tables"), ("Space", "Tag"), ("r", "Refresh"), ("F10", "Quit"),
)  # fmt: skip
_HELP = (
    ("Arrows PgUp PgDn Home End, k j", "move; left and right show more columns"),
    ("Tab, Shift-Tab", "next and previous table"),
    ("F3 /", "incremental search; F3 finds the next match, Enter and Esc close it"),
    ("n", "next match of the search"),
    ("F4 \\", "show only rows that contain a text; a|b matches either, Esc shows all rows"),
    ("F5 t", "tree: ranks below jobs, workers below ranks and hosts"),
    ("+ - Enter, *", "in the tree: fold or unfold the row, or all rows"),
    ("F6 < > , .", "choose the column to sort by"),
    ("I", "reverse the sort order"),
    ("u", "show the jobs of one user only"),
    ("Space, U", "tag a row (tagged jobs are summed up); untag all"),
    ("F", "keep the cursor on its row when the order changes"),
    ("Z", "pause or resume"),
    ("r, Ctrl-L", "refresh now; redraw the screen"),
    ("F1 h ?", "this help"),
    ("F10 q Ctrl-C", "quit"),
)


class Span(NamedTuple):
    text: str
    style: str = ""


Line = list[Span]


@dataclass(frozen=True, slots=True)
class Size:
    columns: int
    lines: int


def frame(state: TopState, size: Size, now: float) -> list[Line]:
    """Return at most ``size.lines`` lines of at most ``size.columns`` cells. If the space is too
    small, the line of keys is left out first, then the part above the table."""
    if state.is_helping:
        return _clipped(list(_help_lines(state.table)), size)
    head = list(_head_lines(state, size.columns, now))
    foot = list(_footer_lines(state, size.columns))
    room = size.lines - len(head) - len(foot)
    if room < 3:
        head = head[:1] if size.lines >= 4 else []
        foot = foot[-1:] if size.lines >= 5 or state.prompt is not None else []
        room = size.lines - len(head) - len(foot)
    body = _body_lines(state, Size(size.columns, max(room, 1)))
    if state.menu is not None:
        body = _beside(_menu_lines(state.menu, max(room, 1)), body)
    body += [[] for _ in range(room - len(body))]
    return _clipped([*head, *body, *foot], size)


def frame_text(view: PoolView, *, is_tree: bool) -> str:
    """Return all tables as text, at their full width."""
    state = TopState(is_tree=is_tree)
    state.update(view, ())
    lines = ["".join(span.text for span in line).rstrip() for line in _summary(view, 100)]
    for index, table in enumerate(TABLES):
        if table.name == "Events":  # events follow from two statuses, and this is a single one
            continue
        state.show(index)
        rows = state.rows()
        lines += ["", f"{table.name}:"]
        lines += [text.rstrip() for text, _ in _table_texts(table, rows)] if rows else ["none"]
    return "\n".join(lines)


def _head_lines(state: TopState, columns: int, now: float) -> Iterator[Line]:
    view = state.view
    if view is None:
        yield [Span(f"penstock top {__version__}", "title"), Span(": waiting for the controller")]
        return
    yield from _summary(view, columns)
    if state.trouble:
        yield [Span(f"last update {now - view.at:.0f} s ago: {state.trouble}", "bad")]
    elif state.is_paused:
        yield [Span(f"paused {now - view.at:.0f} s ago; press Z to resume", "warn")]
    tabs: Line = []
    for table in TABLES:
        style = "tab" if table is state.table else "dim"
        tabs += [Span(f"[{table.name}]" if table is state.table else f" {table.name} ", style)]
    yield tabs


def _summary(view: PoolView, columns: int) -> Iterator[Line]:
    totals = view.totals()
    settled = "" if view.is_settled else "; starting, no workers are assigned yet"
    yield [
        Span("penstock top", "title"),
        Span(f"  controller {view.controller[:8]} at {view.endpoint}{settled}"),
    ]
    bar = max(8, min(30, columns // 3))
    by_state = totals["workers_by_state"]
    states = ", ".join(f"{by_state[state]} {state}" for state in WORKER_STATES if by_state[state])
    serving = by_state["serving"] / totals["workers"] if totals["workers"] else 0.0
    is_measured = all(one.is_measured or one.is_idle for one in view.trainers)
    wanted = f"{totals['workers_wanted']} wanted" if is_measured else "demand not measured yet"
    yield [
        Span("workers "),
        *_bar(serving, bar, "good"),
        Span(f" {totals['workers']}: {states or 'none'}; {wanted}"),
    ]
    waited = totals["waited_share"]
    tone = "good" if (waited or 0) < 0.1 else "warn" if (waited or 0) < 0.3 else "bad"
    idle = f", {totals['trainers_idle']} idle" if totals["trainers_idle"] else ""
    yield [
        Span("waiting "),
        *_bar(waited or 0.0, bar, tone),
        Span(f" {share(waited)} of {totals['trainers']} trainers{idle}; "),
        Span(f"{rate_text(totals['batches_per_s'])} batches/s, {byte_rate(totals['bytes_per_s'])}"),
    ]
    if view.engine is not None:
        yield _engine_line(view.engine)
    if view.policy_trouble:
        text = f"workers are distributed evenly, since the policy failed: {view.policy_trouble}"
        yield [Span(text, "bad")]
    if view.left_out:
        text = f"{view.left_out} members are omitted: the status has no room for them"
        yield [Span(text, "warn")]


def _engine_line(engine: EngineView) -> Line:
    money = ""
    if engine.spent is not None:
        of = "" if engine.budget is None else f" of {engine.budget:g}"
        money = f"; {engine.spent:.2f}{of} spent"
    line = [
        Span(
            f"engine {engine.name}: {engine.running} running, {engine.starting} starting, "
            f"{engine.stopping} stopping, {engine.wanted} wanted ({engine.workers_min} to "
            f"{engine.workers_max}){money}; {engine.reason}"
        )
    ]
    trouble = engine.trouble or engine.refusal
    return [*line, Span(f"; {trouble}", "bad")] if trouble else line


def _bar(part: float, cells: int, style: str) -> Line:
    full = round(max(0.0, min(1.0, part)) * cells)
    return [Span("["), Span("|" * full, style), Span(" " * (cells - full)), Span("]")]


def _body_lines(state: TopState, size: Size) -> list[Line]:
    rows = state.rows()
    has_head = size.lines >= 2
    state.page_rows = max(1, size.lines - has_head)
    selected = state.settle(rows)
    if not rows:
        what = "no row matches the filter" if state.filter or state.user else "none"
        return [[Span(f"{state.table.name}: {what}", "dim")]]
    texts = _table_texts(state.table, rows)
    left, top = state.place.left, state.place.top
    lines = []
    if has_head:
        lines.append(
            [Span(fitted(_from(_head_with_order(state, texts[0][0]), left), size.columns), "head")]
        )
    for index in range(top, min(len(rows), top + state.page_rows)):
        text, shown = texts[index + 1]
        assert shown is not None
        style = shown.row.tone
        if shown.row.id in state.tags:
            style = "tagged"
        if index == selected:
            style = "selected"
        lines.append([Span(fitted(_from(text, left), size.columns), style)])
    return lines


def _head_with_order(state: TopState, head: str) -> str:
    """Add a mark at the column by which the rows are sorted."""
    column = state.sorted_by()
    if column is None:
        return head
    mark = "v" if state.place.is_descending else "^"
    place = head.find(f"{column.title}")
    end = place + len(column.title)
    return head if place < 0 else head[:end] + mark + head[end + 1 :]


def _from(text: str, cells: int) -> str:
    """Return the text without its first ``cells`` cells."""
    return text if cells == 0 else text[len(cut(text, cells)) :]


def _table_texts(table: Table, rows: Sequence[ShownRow]) -> list[tuple[str, ShownRow | None]]:
    """Return the head and the rows, with columns as wide as their widest cells."""
    texts: list[list[str]] = [[column.title for column in table.columns]]
    for shown in rows:
        cells = [shown.row.cells.get(column.name, "") for column in table.columns]
        names = [column.name for column in table.columns]
        place = names.index(table.branch)
        cells[place] = f"{shown.branch}{'+ ' if shown.is_folded else ''}{cells[place]}"
        texts.append(cells)
    widths = [max(cell_count(line[place]) for line in texts) for place in range(len(table.columns))]
    lines = [
        _GAP.join(
            fitted(cell, width, to_the_right=column.is_number)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        )
        for cells in texts
    ]
    return list(zip(lines, [None, *rows], strict=True))


def _footer_lines(state: TopState, columns: int) -> Iterator[Line]:
    yield [Span(_detail_of(state), "dim")]
    if state.prompt is not None:
        shown = state.prompt.text
        room = max(1, columns - len(state.prompt.title) - 4)
        while cell_count(shown) > room:
            shown = shown[1:]
        yield [Span(f"{state.prompt.title}: ", "key"), Span(f"{shown}_")]
        return
    if state.menu is not None:
        yield [Span("Enter", "key"), Span("Choose "), Span("Esc", "key"), Span("Cancel")]
        return
    keys: Line = []
    for key, word in _KEYS:
        word = "List" if word == "Tree" and state.is_tree else word
        keys += [Span(key, "key"), Span(f"{word} ", "bar")]
    yield keys


def _detail_of(state: TopState) -> str:
    rows = state.rows()
    tagged = [shown.row for shown in rows if shown.row.id in state.tags]
    parts = []
    if tagged:
        parts.append(f"{len(tagged)} tagged: {sum(row.rate for row in tagged):,.1f} batches/s")
    if state.filter:
        parts.append(f"filter: {state.filter}")
    if state.user:
        parts.append(f"user: {state.user}")
    if state.is_following:
        parts.append("following")
    if rows:
        row = rows[state.settle(rows)].row
        if row.detail:
            parts.append(row.detail)
    return " | ".join(parts)


def _menu_lines(menu: Menu, lines: int) -> list[Line]:
    width = max(cell_count(shown) for _, shown in [*menu.choices, ("", menu.title)]) + 1
    room = max(1, lines - 1)
    top = max(0, min(menu.index - room // 2, len(menu.choices) - room))
    found: list[Line] = [[Span(fitted(menu.title, width), "head")]] if lines > 1 else []
    for index in range(top, min(len(menu.choices), top + room)):
        style = "selected" if index == menu.index else ""
        found.append([Span(fitted(menu.choices[index][1], width), style)])
    while len(found) < lines:
        found.append([Span(" " * width)])
    return found


def _beside(left: list[Line], right: list[Line]) -> list[Line]:
    right = right + [[] for _ in range(len(left) - len(right))]
    return [[*a, Span(" "), *b] for a, b in zip(left, right, strict=False)]


def _help_lines(table: Table) -> Iterator[Line]:
    yield [Span(f"penstock top {__version__}", "title"), Span(" is a read-only view of a pool.")]
    yield []
    for keys, meaning in _HELP:
        yield [Span(f"{keys:>30}", "key"), Span(f"  {meaning}")]
    yield []
    yield [Span(f"columns of {table.name}:", "title")]
    for column in table.columns:
        yield [Span(f"{column.title:>30}", "key"), Span(f"  {column.meaning}")]
    yield [Span("press any key to return", "dim")]


def _clipped(lines: list[Line], size: Size) -> list[Line]:
    clipped = []
    for line in lines[: max(size.lines, 0)]:
        room, spans = size.columns, []
        for span in line:
            text = cut(span.text, room)
            if text:
                spans.append(Span(text, span.style))
            room -= cell_count(text)
        clipped.append(spans)
    return clipped


def cell_count(text: str) -> int:
    """Return the number of terminal cells that the text takes."""
    return len(text) if text.isascii() else sum(_cells_of(character) for character in text)


def cut(text: str, cells: int) -> str:
    """Return the longest prefix that fits."""
    if text.isascii():
        return text[: max(cells, 0)]
    taken = 0
    for place, character in enumerate(text):
        taken += _cells_of(character)
        if taken > cells:
            return text[:place]
    return text


def fitted(text: str, cells: int, *, to_the_right: bool = False) -> str:
    """Cut or pad the text to exactly ``cells`` cells."""
    short = cut(text, cells)
    spaces = " " * (cells - cell_count(short))
    return spaces + short if to_the_right else short + spaces


def _cells_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
