# SPDX-License-Identifier: Apache-2.0
"""`penstock top` on a terminal: rich draws the state, and the terminal's bytes become keys. Other
modules import this one inside functions, as rich is optional."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text
from rich.theme import Theme

from penstock._version import __version__
from penstock.errors import PenstockError
from penstock.live.pool_view import WORKER_STATES, EngineView, PoolAddress, PoolView, ask_pool
from penstock.live.pool_watch import PoolWatch
from penstock.live.top_state import HELP, Menu, TopState
from penstock.live.top_tables import (
    TABLES,
    Column,
    ShownRow,
    Table,
    byte_rate,
    rate,
    share,
    tone_of_waiting,
)
from penstock.pool.pool_status import format_spent

_TURN_S = 0.1  # the longest delay of a new status or size
_ESCAPE_S = 0.025  # the longest time between the bytes of a key
_GAP = 2  # cells between columns
# Without colours, only bold, dim and reverse are visible.
_THEME = Theme({
    "title": "bold cyan", "head": "reverse green", "selected": "bold reverse cyan",
    "tagged": "bold yellow", "good": "green", "warn": "yellow", "bad": "bold red",
    "key": "bold", "bar": "reverse cyan",
})  # fmt: skip
_KEY_BAR = {
    "F1": "Help", "F3": "Search", "F4": "Filter", "F5": "Tree", "F6": "SortBy", "Tab": "Tables",
    "Space": "Tag", "r": "Refresh", "F10": "Quit",
}  # fmt: skip
_KEY = re.compile(r"\x1b\[\[[A-E]|\x1b[\[O][\d;]*[A-Za-z~]|\x1b\t|.", re.DOTALL)
_UNFINISHED = re.compile(r"\x1b(\[\[?|O)?[\d;]*$")
_ANSWERS = {"ctrl-z": "suspend", "closed": "quit"}  # in every mode
_NAMES = {
    "\r": "enter", "\n": "enter", "\t": "tab", "\x1b": "escape", "\x7f": "backspace",
    "\b": "backspace", "\x0c": "ctrl-l", "\x15": "ctrl-u", "\x1a": "ctrl-z", "\x1b\t": "back tab",
}  # fmt: skip
# Sequences after the escape character and [ or O: of xterm, of the Linux console, of VT220.
_SEQUENCES = {
    "A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "Z": "back tab",
    "1~": "home", "7~": "home", "4~": "end", "8~": "end", "5~": "page up", "6~": "page down",
    "M": "enter", **{letter: f"f{n}" for n, letter in enumerate("PQRS", 1)},
    **{f"[{letter}": f"f{n}" for n, letter in enumerate("ABCDE", 1)},
    **{f"{10 + n + (n > 5)}~": f"f{n}" for n in range(1, 11)},
}  # fmt: skip


def frame_text(view: PoolView, *, is_tree: bool) -> str:
    """Return all tables as text, at their full width. Without events, which follow from two
    statuses."""
    state, console = TopState(view, is_tree=is_tree), make_console(width=100_000, color_system=None)
    with console.capture() as capture:
        console.print(Group(*_summary(view, 100)))
        for table in TABLES[:-1]:
            state.show(table)
            rows = state.rows()
            console.print(f"\n{table.name}:")
            console.print(_drawn(state, rows, rows) if rows else "none")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def run_screen(address: PoolAddress, *, interval_s: float, no_color: bool, is_tree: bool) -> None:
    """Show the pool until the user quits. Raises PenstockError if the terminal cannot show a full
    screen, and like `ask_pool` if the controller does not answer at first."""
    console = make_console(no_color=no_color, force_terminal=True, force_interactive=True)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise PenstockError(
            "needs a terminal, but standard input or output is not one; print one frame with "
            "--once, or --once --json for programs"
        )
    if console.is_dumb_terminal:
        raise PenstockError(
            f"the terminal {os.environ['TERM']!r} cannot move its cursor; set TERM correctly, or "
            "print one frame with --once"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may have characters that it lacks
    state = TopState(ask_pool(address), console.options.ascii_only, is_tree)
    watch = PoolWatch(address, interval_s=interval_s)
    watch.take(state.view)
    watch.start()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            while _show(console, state, watch) == "suspend":
                os.kill(0, signal.SIGTSTP)  # the job of the shell; returns when it is continued
        finally:
            watch.close()


def make_console(**options: Any) -> Console:
    """Return a console that shows texts as they are."""
    return Console(theme=_THEME, markup=False, emoji=False, highlight=False, **options)


def _show(console: Console, state: TopState, watch: PoolWatch) -> str:
    """Show the pool until a key quits or suspends; restore the terminal in any case."""
    fd = sys.stdin.fileno()
    keys, settings = _Keys(fd), termios.tcgetattr(fd)
    live = Live(
        get_renderable=lambda: frame(state, *console.size, time.time()),
        console=console, screen=True, auto_refresh=False, redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip
    try:
        tty.setcbreak(fd, termios.TCSADRAIN)
        changed = termios.tcgetattr(fd)
        changed[6][termios.VSUSP] = b"\0"  # Ctrl-Z is a key, so that the terminal is restored first
        termios.tcsetattr(fd, termios.TCSADRAIN, changed)
        live.start()
        drawn: tuple[object, ...] = ()
        pressed: list[str] = []
        while True:
            for key in pressed:
                answer = _ANSWERS.get(key) or state.press(key)
                if answer in ("suspend", "quit"):
                    return answer
                if answer == "refresh":
                    watch.ask_now()
            view, events, state.trouble = watch.latest()
            state.update(view or state.view, events, watch.ended_jobs())
            # The ages of a frame are in seconds.
            now = (state.view, state.trouble, console.size, int(time.monotonic()))
            if pressed or now != drawn:
                live.refresh()
                drawn = now
            pressed = keys.read(_TURN_S)
    finally:
        live.stop()
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)


class _Keys:
    """Reads the keys of a terminal in cbreak mode."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, seconds: float) -> list[str]:
        """Return the keys that are pressed within a time, by name; "closed" if the terminal is."""
        text = ""
        while select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, 4096)
            except OSError:
                data = b""
            if not data:
                return ["closed"]
            text += self._decoder.decode(data)
            if not _UNFINISHED.search(text):
                break
            seconds = _ESCAPE_S
        return [_name_of(key) for key in _KEY.findall(text)]


def _name_of(key: str) -> str:
    if key[:2] in ("\x1b[", "\x1bO"):
        return _SEQUENCES.get(key[2:], "")
    return _NAMES.get(key, key)


def frame(state: TopState, columns: int, lines: int, now: float) -> RenderableType:
    """Return a frame. If the space is too small, the line of keys is left out first, then the part
    above the table."""
    if state.is_helping:
        return Group(*_help(state.table))
    head, foot = [*_head(state, columns, now)], [*_foot(state, columns)]
    if lines < len(head) + len(foot) + 3:
        head = head[:1] if lines >= 4 else []
        foot = foot[-1:] if lines >= 5 or state.prompt is not None else []
    room = max(1, lines - len(head) - len(foot))
    body = Layout(_body(state, room))
    if state.menu is not None:
        beside, body = body, Layout()
        body.split_row(_menu(state.menu, room), beside)
    above, below = (
        Layout(Group(*part), size=len(part), visible=bool(part)) for part in (head, foot)
    )
    whole = Layout()
    whole.split_column(above, body, below)
    return whole


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _head(state: TopState, columns: int, now: float) -> Iterator[Text]:
    yield from _summary(state.view, columns)
    age_s = now - state.view.at
    if state.trouble:
        yield _line((f"last update {age_s:.0f} s ago: {state.trouble}", "bad"))
    elif state.is_paused:
        yield _line((f"paused {age_s:.0f} s ago; press Z to resume", "warn"))
    yield _line(*(
        (f"[{one.name}]", "title") if one is state.table else (f" {one.name} ", "dim")
        for one in TABLES
    ))  # fmt: skip


def _summary(view: PoolView, columns: int) -> Iterator[Text]:
    totals = view.totals()
    settled = "" if view.is_settled else "; starting, no workers are assigned yet"
    where = f"  controller {view.controller[:8]} at {view.endpoint}{settled}"
    yield _line(("penstock top", "title"), where)
    by_state = totals["workers_by_state"]
    states = ", ".join(f"{by_state[state]} {state}" for state in WORKER_STATES if by_state[state])
    serving = by_state["serving"] / totals["workers"] if totals["workers"] else 0.0
    is_measured = all(one.is_measured or one.is_idle for one in view.trainers)
    wanted = f"{totals['workers_wanted']} wanted" if is_measured else "demand not measured yet"
    workers = f" {totals['workers']}: {states or 'none'}; {wanted}"
    yield _line("workers ", *_bar(serving, columns, "good"), workers)
    waited = totals["waited_share"]
    idle = f", {totals['trainers_idle']} idle" if totals["trainers_idle"] else ""
    yield _line(
        "waiting ",
        *_bar(waited or 0.0, columns, tone_of_waiting(waited)),
        f" {'-' if waited is None else share(waited)} of {totals['trainers']} trainers{idle}; "
        f"{rate(totals['batches_per_s'])} batches/s, {byte_rate(totals['bytes_per_s'])}",
    )
    if view.engine is not None:
        yield _engine_line(view.engine)
    if view.policy_trouble:
        text = f"workers are distributed evenly, since the policy failed: {view.policy_trouble}"
        yield _line((text, "bad"))
    if view.left_out:
        text = f"{view.left_out} members are omitted: the status has no room for them"
        yield _line((text, "warn"))


def _bar(part: float, columns: int, style: str) -> tuple[str | tuple[str, str], ...]:
    cells = max(8, min(30, columns // 3))
    full = round(max(0.0, min(1.0, part)) * cells)
    return "[", ("|" * full, style), " " * (cells - full) + "]"


def _engine_line(engine: EngineView) -> Text:
    trouble = engine.trouble or engine.refusal
    money = format_spent(engine.spent, engine.budget)
    return _line(
        f"engine {engine.name}: {engine.running} running, {engine.starting} starting, "
        f"{engine.stopping} stopping, {engine.wanted} wanted ({engine.workers_min} to "
        f"{engine.workers_max}){money}; {engine.reason}",
        (f"; {trouble}" if trouble else "", "bad"),
    )


def _body(state: TopState, lines: int) -> RenderableType:
    state.page_rows = max(1, lines - 1)
    rows = state.rows()
    selected, place = state.settle(rows), state.place
    if not rows:
        what = "no row matches the filter" if state.filter or state.user else "none"
        return _line((f"{state.table.name}: {what}", "dim"))
    drawn = _drawn(state, rows, rows[place.top : place.top + state.page_rows])
    drawn.show_header = lines > 1
    drawn.rows[selected - place.top].style = "selected"
    return _Scrolled(drawn, place.left)


class _Scrolled:
    """A table at its full width, of which the first cells are hidden."""

    def __init__(self, table: RichTable, left: int) -> None:
        self._table = table
        self._left = left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        end = self._left + options.max_width
        for line in console.render_lines(self._table, options.update(width=end, height=None)):
            yield from [*Segment.divide(line, (self._left, end))][1]
            yield Segment.line()


def _drawn(state: TopState, rows: Sequence[ShownRow], seen: Sequence[ShownRow]) -> RichTable:
    """Return a table of the rows ``seen``, with columns as wide as all rows require."""
    table, order = state.table, state.place
    drawn = RichTable(box=None, padding=(0, _GAP, 0, 0), header_style="head")
    width = 0
    for column in table.columns:
        mark = "" if column != order.sort else "v" if order.is_descending else "^"
        cells = [column.title + mark, *(_cell(table, shown, column) for shown in rows)]
        cells_max = max(map(cell_len, cells))
        width += cells_max + _GAP
        drawn.add_column(
            cells[0],
            width=cells_max,
            no_wrap=True,
            justify="right" if column.is_number else "left",
        )
    drawn.width = width
    for shown in seen:
        style = "tagged" if shown.row.id in state.tags else shown.row.tone
        drawn.add_row(*(_cell(table, shown, column) for column in table.columns), style=style)
    return drawn


def _cell(table: Table, shown: ShownRow, column: Column) -> str:
    return (shown.branch if column is table.columns[0] else "") + shown.row.cell(column)


def _menu(menu: Menu, lines: int) -> Layout:
    """Return the part of a menu that fits, around its choice."""
    width = max(cell_len(text) for text in [menu.title, *(text for _, text in menu.choices)]) + 1
    room = max(1, lines - 1)
    top = max(0, min(menu.index - room // 2, len(menu.choices) - room))
    shown = [_line((f"{menu.title:<{width}}", "head"))] if lines > 1 else []
    for index, (_, text) in enumerate(menu.choices[top : top + room], top):
        shown.append(_line((f"{text:<{width}}", "selected" if index == menu.index else "")))
    return Layout(Group(*shown), size=width + 1)


def _foot(state: TopState, columns: int) -> Iterator[Text]:
    yield _line((_detail(state), "dim"))
    if state.prompt is not None:
        shown = state.prompt.text
        while cell_len(shown) > max(1, columns - len(state.prompt.title) - 4):
            shown = shown[1:]
        yield _line((f"{state.prompt.title}: ", "key"), f"{shown}_")
    elif state.menu is not None:
        yield _line(("Enter", "key"), "Choose ", ("Esc", "key"), "Cancel")
    else:
        words = {**_KEY_BAR, "F5": "List"} if state.is_tree else _KEY_BAR
        pairs = (((key, "key"), (f"{word} ", "bar")) for key, word in words.items())
        yield _line(*itertools.chain.from_iterable(pairs))


def _detail(state: TopState) -> str:
    rows = state.rows()
    tagged = [shown.row for shown in rows if shown.row.id in state.tags]
    rates = [row.values.get("batches_per_s") for row in tagged]
    total = sum(value for value in rates if isinstance(value, float))
    parts = (
        f"{len(tagged)} tagged: {rate(total)} batches/s" if tagged else "",
        f"filter: {state.filter}" if state.filter else "",
        f"user: {state.user}" if state.user else "",
        "following" if state.is_following else "",
        rows[state.settle(rows)].row.detail if rows else "",
    )
    return " | ".join(filter(None, parts))


def _help(table: Table) -> Iterator[Text]:
    yield _line(
        (f"penstock top {__version__}", "title"),
        " is a read-only view of a pool; press any key to return",
    )
    yield _line()
    for keys, meaning in HELP:
        yield _line((f"{keys:>30}", "key"), f"  {meaning}")
    yield _line()
    yield _line((f"columns of {table.name}:", "title"))
    for column in table.columns:
        yield _line((f"{column.title:>30}", "key"), f"  {column.meaning}")
