# SPDX-License-Identifier: Apache-2.0
"""The state of `penstock top`, and the effect of each key on it. Independent of the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.live.pool_history import EventView
from penstock.live.pool_view import Ledger, PoolView
from penstock.live.top_rows import (
    TABLES,
    Column,
    DisplayData,
    Row,
    ShownRow,
    Table,
    in_tree,
    matcher,
    sorted_rows,
)

_TEXT_MAX = 200  # of a search or a filter
_COLUMNS_STEP = 8  # cells per step to the side
_ALL_USERS = "all users"


@dataclass(slots=True)
class _Place:
    """The visible part and the selected row of a table."""

    sort: str
    is_descending: bool
    row_id: str = ""
    index: int = 0
    top: int = 0  # the first visible row
    left: int = 0  # cells hidden at the left


@dataclass(slots=True)
class Prompt:
    """A line of text that is being typed: "Search" or "Filter"."""

    title: str
    text: str
    before: str  # restored by Escape


@dataclass(slots=True)
class Menu:
    """A list to choose from."""

    title: str
    choices: list[tuple[str, str]]  # the value of a choice, and its text
    index: int


@dataclass(slots=True)
class TopState:
    """Confined to one thread. ``trouble`` is the reason why there is no newer status."""

    in_ascii: bool = False
    view: PoolView | None = None
    trouble: str = ""
    is_tree: bool = False
    is_paused: bool = False
    is_following: bool = False
    is_helping: bool = False
    search: str = ""
    filter: str = ""
    user: str = ""
    prompt: Prompt | None = None
    menu: Menu | None = None
    tags: set[str] = field(default_factory=set)
    page_rows: int = 10  # number of rows visible in the last frame
    _table: int = 0
    _folded: set[str] = field(default_factory=set)
    _events: tuple[EventView, ...] = ()
    _ledgers: dict[str, Ledger] = field(default_factory=dict)
    _ledgers_before: dict[str, Ledger] = field(default_factory=dict)
    _places: list[_Place] = field(
        default_factory=lambda: [_Place(table.sort, table.is_descending) for table in TABLES]
    )

    def update(self, view: PoolView, events: tuple[EventView, ...]) -> None:
        """Take a new status, unless the view is paused."""
        self.trouble = ""
        if self.is_paused:
            return
        self._ledgers_before = self._ledgers
        self._ledgers = {one.id: one.ledger for one in view.trainers if one.ledger is not None}
        self.view = view
        self._events = events

    @property
    def table(self) -> Table:
        return TABLES[self._table]

    @property
    def place(self) -> _Place:
        return self._places[self._table]

    def show(self, table_index: int) -> None:
        """Show one of TABLES."""
        self._table = table_index

    def rows(self) -> list[ShownRow]:
        """Return all rows that pass the filter, in order."""
        if self.view is None:
            return []
        display = DisplayData(self.view, self._ledgers_before, self._events)
        rows = self.table.rows(display, self.is_tree)
        rows = sorted_rows(rows, self.place.sort, self.place.is_descending)
        fits_filter = matcher(self.filter)

        def is_shown(row: Row) -> bool:
            return fits_filter(row) and (not self.user or row.user in ("", self.user))

        if self.is_tree:
            return in_tree(rows, is_shown, self._folded, self.in_ascii)
        return [ShownRow(row) for row in rows if is_shown(row)]

    def settle(self, rows: list[ShownRow]) -> int:
        """Return the index of the selected row; keep it and the first visible row within bounds."""
        place = self.place
        if self.is_following:
            found = [index for index, shown in enumerate(rows) if shown.row.id == place.row_id]
            place.index = found[0] if found else place.index
        place.index = max(0, min(place.index, len(rows) - 1))
        place.row_id = rows[place.index].row.id if rows else ""
        place.top = max(place.index - self.page_rows + 1, min(place.top, place.index))
        place.top = max(0, min(place.top, len(rows) - self.page_rows))
        return place.index

    def press(self, key: str) -> str:
        """Handle a key, given by its name, or a character. Returns "quit", "refresh", "redraw" or
        ""."""
        if self.is_helping:
            self.is_helping = False
            return ""
        if self.prompt is not None:
            self._press_in_prompt(self.prompt, key)
            return ""
        if self.menu is not None:
            self._press_in_menu(self.menu, key)
            return ""
        if key in ("q", "f10"):
            return "quit"
        if key == "r":
            return "refresh"
        if key == "ctrl-l":
            return "redraw"
        if action := _ACTIONS.get(key):
            action(self)
        return ""

    def _press_in_prompt(self, prompt: Prompt, key: str) -> None:
        is_search = prompt.title == "Search"
        if key == "escape":
            prompt.text = prompt.before
            self.prompt = None
        elif key == "enter":
            self.prompt = None
        elif key == "f3" and is_search:
            self._find_next(prompt.text, from_here=False)
            return
        elif key == "backspace":
            prompt.text = prompt.text[:-1]
        elif key == "ctrl-u":
            prompt.text = ""
        elif len(key) == 1 and key.isprintable():
            prompt.text = (prompt.text + key)[:_TEXT_MAX]
        if is_search:
            self.search = prompt.text
            if self.prompt is not None:
                self._find_next(prompt.text, from_here=True)
        else:
            self.filter = prompt.text

    def _press_in_menu(self, menu: Menu, key: str) -> None:
        last = len(menu.choices) - 1
        steps = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -last, "end": last}
        if key in steps:
            menu.index = max(0, min(last, menu.index + steps[key]))
        elif key in ("escape", "q", "f10"):
            self.menu = None
        elif key == "enter":
            self.menu = None
            chosen = menu.choices[menu.index][0]
            if menu.title == "User":
                self.user = chosen
                return
            column = next((one for one in self.table.columns if one.name == chosen), None)
            self.place.sort = chosen
            self.place.is_descending = column is not None and column.is_number

    def _find_next(self, text: str, *, from_here: bool) -> None:
        if not text:
            return
        rows, fits = self.rows(), matcher(text)
        here = self.settle(rows)
        first = here if from_here else here + 1
        for step in range(len(rows)):
            index = (first + step) % len(rows)
            if fits(rows[index].row):
                self.place.index = index
                self.place.row_id = rows[index].row.id
                return

    def _selected(self) -> ShownRow | None:
        rows = self.rows()
        index = self.settle(rows)
        return rows[index] if rows else None

    def _move(self, steps: int) -> None:
        rows = self.rows()
        place = self.place
        place.index = max(0, min(self.settle(rows) + steps, len(rows) - 1))
        place.row_id = rows[place.index].row.id if rows else ""

    def _switch(self, step: int) -> None:
        self._table = (self._table + step) % len(TABLES)

    def _shift(self, step: int) -> None:
        self.place.left = max(0, self.place.left + step * _COLUMNS_STEP)

    def _tag(self) -> None:
        if selected := self._selected():
            self.tags ^= {selected.row.id}
            self._move(1)

    def _untag(self) -> None:
        self.tags.clear()

    def _fold(self) -> None:
        if selected := self._selected():
            self._folded ^= {selected.row.id}

    def _fold_all(self) -> None:
        if self._folded:
            self._folded.clear()
        else:
            self._folded = {shown.row.parent for shown in self.rows() if shown.row.parent}

    def _toggle_tree(self) -> None:
        self.is_tree = not self.is_tree

    def _toggle_following(self) -> None:
        self.is_following = not self.is_following

    def _toggle_pause(self) -> None:
        self.is_paused = not self.is_paused

    def _toggle_order(self) -> None:
        self.place.is_descending = not self.place.is_descending

    def _help(self) -> None:
        self.is_helping = True

    def _open_search(self) -> None:
        self.prompt = Prompt("Search", "", self.search)

    def _open_filter(self) -> None:
        self.prompt = Prompt("Filter", self.filter, "")

    def _search_on(self) -> None:
        self._find_next(self.search, from_here=False)

    def _open_sort(self) -> None:
        choices = [("", "order of the controller")]
        choices += [(column.name, column.title) for column in self.table.columns]
        names = [name for name, _ in choices]
        self.menu = Menu("Sort by", choices, names.index(self.place.sort))

    def _open_users(self) -> None:
        view = self.view
        users = sorted({one.user for one in view.trainers if one.user}) if view is not None else []
        choices = [("", _ALL_USERS), *((user, user) for user in users)]
        index = users.index(self.user) + 1 if self.user in users else 0
        self.menu = Menu("User", choices, index)

    def sorted_by(self) -> Column | None:
        """Return the current sort column of the table."""
        return next((one for one in self.table.columns if one.name == self.place.sort), None)


_ACTIONS: dict[str, Callable[[TopState], None]] = {
    "f1": TopState._help,
    "h": TopState._help,
    "?": TopState._help,
    "f3": TopState._open_search,
    "/": TopState._open_search,
    "n": TopState._search_on,
    "f4": TopState._open_filter,
    "\\": TopState._open_filter,
    "f5": TopState._toggle_tree,
    "t": TopState._toggle_tree,
    "f6": TopState._open_sort,
    "<": TopState._open_sort,
    ">": TopState._open_sort,
    ",": TopState._open_sort,
    ".": TopState._open_sort,
    "I": TopState._toggle_order,
    "u": TopState._open_users,
    "F": TopState._toggle_following,
    "Z": TopState._toggle_pause,
    " ": TopState._tag,
    "U": TopState._untag,
    "+": TopState._fold,
    "-": TopState._fold,
    "enter": TopState._fold,
    "*": TopState._fold_all,
    "tab": lambda state: state._switch(1),
    "back tab": lambda state: state._switch(-1),
    "up": lambda state: state._move(-1),
    "k": lambda state: state._move(-1),
    "down": lambda state: state._move(1),
    "j": lambda state: state._move(1),
    "page up": lambda state: state._move(-state.page_rows),
    "page down": lambda state: state._move(state.page_rows),
    "home": lambda state: state._move(-(1 << 30)),
    "end": lambda state: state._move(1 << 30),
    "left": lambda state: state._shift(-1),
    "right": lambda state: state._shift(1),
}
