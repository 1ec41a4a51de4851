# SPDX-License-Identifier: Apache-2.0
"""The state of `penstock top`, and the effect of each key on it. Independent of the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.live.pool_history import EndedJob, EventView
from penstock.live.pool_view import Ledger, PoolView
from penstock.live.top_tables import (
    TABLES,
    Column,
    DisplayData,
    Row,
    ShownRow,
    Table,
    in_tree,
    matches,
    sorted_rows,
)

HELP = (
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
    ("F10 q Ctrl-C, Ctrl-Z", "quit; suspend"),
)
_ANSWERS = {"q": "quit", "f10": "quit", "r": "refresh", "ctrl-l": "redraw"}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -(1 << 30), "end": 1 << 30}
_TEXT_MAX = 200  # of a search or a filter
_CELLS_STEP = 8  # to the left or the right


@dataclass(slots=True)
class _Place:
    """The visible part, the selected row and the order of a table."""

    sort: Column | None = None
    is_descending: bool = False
    row_id: str = ""
    index: int = 0
    top: int = 0  # the first visible row
    left: int = 0  # cells hidden at the left


@dataclass(slots=True)
class Prompt:
    """A line of text that is being typed: "Search" or "Filter"."""

    title: str
    text: str = ""


@dataclass(slots=True)
class Menu:
    """A list to choose from: columns to "Sort by", or a "User". Each choice has a value and a
    text."""

    title: str
    choices: list[tuple[Any, str]]
    index: int


@dataclass(slots=True)
class TopState:
    """Confined to one thread. ``trouble`` is the reason why there is no newer status."""

    view: PoolView
    in_ascii: bool = False
    is_tree: bool = False
    is_paused: bool = False
    is_following: bool = False
    is_helping: bool = False
    trouble: str = ""
    search: str = ""
    filter: str = ""
    user: str | None = None
    prompt: Prompt | None = None
    menu: Menu | None = None
    tags: set[str] = field(default_factory=set)
    page_rows: int = 10  # number of rows visible in the last frame
    _table: int = 0
    _folded: set[str] = field(default_factory=set)
    _events: tuple[EventView, ...] = ()
    _ended: tuple[EndedJob, ...] = ()
    _ledgers_before: dict[str, Ledger] = field(default_factory=dict)
    _places: list[_Place] = field(default_factory=lambda: [_Place() for _ in TABLES])

    def update(
        self,
        view: PoolView,
        events: tuple[EventView, ...],
        ended: tuple[EndedJob, ...] = (),
    ) -> None:
        """Take a new status, unless the view is paused."""
        if not self.is_paused and view is not self.view:
            before = self.view.trainers
            self._ledgers_before = {one.id: one.ledger for one in before if one.ledger is not None}
            self.view, self._events, self._ended = view, events, ended

    @property
    def table(self) -> Table:
        return TABLES[self._table]

    @property
    def place(self) -> _Place:
        return self._places[self._table]

    def show(self, table: Table) -> None:
        self._table = TABLES.index(table)

    def rows(self) -> list[ShownRow]:
        """Return all rows of the table that pass the filter, in order."""
        table, place = self.table, self.place
        display = DisplayData(self.view, self._ledgers_before, self._events, self._ended)
        rows = sorted_rows([*table.rows(display, self.is_tree)], place.sort, place.is_descending)

        def is_shown(row: Row) -> bool:
            is_of_user = not self.user or row.user in ("", self.user)
            return is_of_user and matches(row, table.columns, self.filter)

        if self.is_tree:
            return in_tree(rows, is_shown, self._folded, self.in_ascii)
        return [ShownRow(row) for row in rows if is_shown(row)]

    def settle(self, rows: list[ShownRow]) -> int:
        """Return the index of the selected row; keep it and the first visible row within bounds."""
        place = self.place
        if self.is_following:
            ids = [shown.row.id for shown in rows]
            place.index = ids.index(place.row_id) if place.row_id in ids else place.index
        place.index = max(0, min(place.index, len(rows) - 1))
        place.row_id = rows[place.index].row.id if rows else ""
        place.top = max(place.index - self.page_rows + 1, min(place.top, place.index))
        place.top = max(0, min(place.top, len(rows) - self.page_rows))
        return place.index

    def press(self, key: str) -> str:
        """Handle a key, given by its name, or a character. Return "quit", "refresh", "redraw" or
        ""."""
        if self.is_helping:
            self.is_helping = False
        elif self.prompt is not None:
            self._type(self.prompt, key)
        elif self.menu is not None:
            self._choose(self.menu, key)
        elif key in _ANSWERS:
            return _ANSWERS[key]
        elif key in _STEPS or key in ("page up", "page down"):
            pages = {"page up": -self.page_rows, "page down": self.page_rows}
            self._move(pages.get(key) or _STEPS[key])
        else:
            self._act(key)
        return ""

    def _act(self, key: str) -> None:
        match key:
            case "f1" | "h" | "?":
                self.is_helping = True
            case "tab" | "back tab":
                self._table = (self._table + (1 if key == "tab" else -1)) % len(TABLES)
            case "left" | "right":
                step = _CELLS_STEP if key == "right" else -_CELLS_STEP
                self.place.left = max(0, self.place.left + step)
            case "f3" | "/":
                self.prompt = Prompt("Search")
            case "n":
                self._find(self.search, from_next=True)
            case "f4" | "\\":
                self.prompt = Prompt("Filter", self.filter)
            case "f5" | "t":
                self.is_tree = not self.is_tree
            case "f6" | "<" | ">" | "," | ".":
                self._open("Sort by", "order of the controller", self.place.sort, {
                    column: column.title for column in self.table.columns
                })  # fmt: skip
            case "u":
                users = sorted({one.user for one in self.view.trainers if one.user})
                self._open("User", "all users", self.user, dict(zip(users, users, strict=True)))
            case "I":
                self.place.is_descending = not self.place.is_descending
            case "F":
                self.is_following = not self.is_following
            case "Z":
                self.is_paused = not self.is_paused
            case " " | "+" | "-" | "enter":
                rows = self.rows()
                selected = {rows[self.settle(rows)].row.id} if rows else set()
                if key == " ":
                    self.tags ^= selected
                    self._move(1)
                else:
                    self._folded ^= selected
            case "U":
                self.tags.clear()
            case "*":
                parents = {shown.row.parent for shown in self.rows() if shown.row.parent}
                self._folded = set() if self._folded else parents

    def _open(self, title: str, default: str, current: Any, texts: dict[Any, str]) -> None:
        """Open a menu of these values, and of None for the default."""
        choices = [(None, default), *texts.items()]
        values = [value for value, _ in choices]
        self.menu = Menu(title, choices, values.index(current) if current in values else 0)

    def _type(self, prompt: Prompt, key: str) -> None:
        is_search = prompt.title == "Search"
        if key in ("enter", "escape"):
            self.prompt = None
            if key == "escape" and not is_search:
                self.filter = ""
            return
        if key == "backspace":
            prompt.text = prompt.text[:-1]
        elif key == "ctrl-u":
            prompt.text = ""
        elif len(key) == 1 and key.isprintable():
            prompt.text = (prompt.text + key)[:_TEXT_MAX]
        if is_search:
            self.search = prompt.text
            self._find(prompt.text, from_next=key == "f3")
        else:
            self.filter = prompt.text

    def _choose(self, menu: Menu, key: str) -> None:
        steps = {**_STEPS, "page up": -10, "page down": 10}.get(key, 0)
        menu.index = max(0, min(len(menu.choices) - 1, menu.index + steps))
        if key in ("escape", "q", "f10", "enter"):
            self.menu = None
        if key == "enter":
            chosen, _ = menu.choices[menu.index]
            if menu.title == "Sort by":
                self.place.sort = chosen
                self.place.is_descending = chosen is not None and chosen.is_number
            else:
                self.user = chosen

    def _find(self, text: str, *, from_next: bool) -> None:
        rows = self.rows() if text else []
        here = self.settle(rows) + from_next if rows else 0
        for shown in rows[here:] + rows[:here]:
            if matches(shown.row, self.table.columns, text):
                self.place.index, self.place.row_id = rows.index(shown), shown.row.id
                return

    def _move(self, steps: int) -> None:
        rows = self.rows()
        self.place.index = max(0, min(self.settle(rows) + steps, len(rows) - 1))
        self.place.row_id = rows[self.place.index].row.id if rows else ""
