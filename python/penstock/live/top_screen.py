# SPDX-License-Identifier: Apache-2.0
"""`penstock top` on a terminal: curses paints its frames and reads its keys."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
import sys
import threading
import time
from collections.abc import Iterator

from penstock.errors import PenstockError
from penstock.live.pool_history import EventLog
from penstock.live.pool_view import PoolAddress, PoolView, StatusPoller
from penstock.live.top_frame import STYLES, Line, Size, cell_count, frame
from penstock.live.top_state import TopState

_TURN_MS = 100  # the longest delay of a key or a new status
_ESCAPE_MS = 25
_KEYS = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_LEFT: "left",
    curses.KEY_RIGHT: "right",
    curses.KEY_PPAGE: "page up",
    curses.KEY_NPAGE: "page down",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_BTAB: "back tab",
    curses.KEY_BACKSPACE: "backspace",
    curses.KEY_ENTER: "enter",
    curses.KEY_RESIZE: "redraw",
    **{curses.KEY_F0 + number: f"f{number}" for number in range(1, 13)},
}
_CHARACTERS = {
    "\n": "enter",
    "\r": "enter",
    "\t": "tab",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x0c": "ctrl-l",
    "\x15": "ctrl-u",
}
# By style: a colour number, or None for the terminal's default, and an attribute. Without colours,
# only the attribute is visible.
_LOOKS: dict[str, tuple[int | None, int]] = {
    "": (None, curses.A_NORMAL),
    "title": (curses.COLOR_CYAN, curses.A_BOLD),
    "head": (curses.COLOR_GREEN, curses.A_REVERSE),
    "selected": (curses.COLOR_CYAN, curses.A_REVERSE),
    "tagged": (curses.COLOR_YELLOW, curses.A_BOLD),
    "good": (curses.COLOR_GREEN, curses.A_NORMAL),
    "warn": (curses.COLOR_YELLOW, curses.A_NORMAL),
    "bad": (curses.COLOR_RED, curses.A_BOLD),
    "dim": (None, curses.A_DIM),
    "key": (None, curses.A_BOLD),
    "bar": (curses.COLOR_CYAN, curses.A_REVERSE),
    "tab": (curses.COLOR_CYAN, curses.A_BOLD),
}


def check_terminal() -> None:
    """Raise PenstockError if the terminal cannot show a full screen."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise PenstockError(
            "needs a terminal, but standard input or output is not one; print one frame with "
            "--once, or --once --json for programs"
        )
    name = os.environ.get("TERM", "")
    try:
        curses.setupterm(fd=sys.stdout.fileno())
    except curses.error as error:
        raise PenstockError(
            f"unknown terminal {name!r} ({error}); set TERM, for example to xterm, or print one "
            "frame with --once"
        ) from None
    if not curses.tigetstr("cup"):
        raise PenstockError(
            f"the terminal {name!r} cannot move its cursor; set TERM correctly, or print one "
            "frame with --once"
        )


def run_screen(
    address: PoolAddress, first: PoolView, *, interval_s: float, with_colours: bool, is_tree: bool
) -> None:
    """Show the pool until the user quits. ``first`` is its current status."""
    locale.setlocale(locale.LC_ALL, "")
    with contextlib.suppress(KeyboardInterrupt), _screen() as window:
        encoding = locale.getpreferredencoding(False).lower().replace("-", "")
        state = TopState(in_ascii=encoding != "utf8", is_tree=is_tree)
        _Screen(window, state, _attributes(with_colours)).run(address, first, interval_s)


@contextlib.contextmanager
def _screen() -> Iterator[curses.window]:
    """Yield the terminal's screen, and restore the terminal in any case."""
    window = curses.initscr()
    try:
        curses.noecho()
        curses.cbreak()
        curses.set_escdelay(_ESCAPE_MS)
        window.keypad(True)
        window.timeout(_TURN_MS)
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        yield window
    finally:
        window.keypad(False)
        curses.echo()
        curses.nocbreak()
        curses.endwin()


def _attributes(with_colours: bool) -> dict[str, int]:
    has_colours = False
    if with_colours:
        with contextlib.suppress(curses.error):
            curses.start_color()
            curses.use_default_colors()
            has_colours = curses.has_colors()
    attributes = {}
    for number, style in enumerate(STYLES, start=1):
        colour, attribute = _LOOKS[style]
        if has_colours and colour is not None:
            curses.init_pair(number, colour, -1)
            attribute |= curses.color_pair(number)
        attributes[style] = attribute
    return attributes


class _Screen:
    """Confined to the main thread, except for the fields that the poller sets under the lock."""

    def __init__(self, window: curses.window, state: TopState, attributes: dict[str, int]) -> None:
        self._window = window
        self._state = state
        self._attributes = attributes
        self._lock = threading.Lock()
        self._news: PoolView | None = None
        self._trouble = ""

    def run(self, address: PoolAddress, first: PoolView, interval_s: float) -> None:
        events = EventLog()
        events.add(first)
        self._state.update(first, events.events())
        poller = StatusPoller(address, interval_s, self._take, self._fail)
        poller.start()
        drawn_at = 0.0
        is_to_draw = True
        try:
            while True:
                with self._lock:
                    news, self._news, trouble = self._news, None, self._trouble
                if news is not None:
                    events.add(news)
                    self._state.update(news, events.events())
                if is_to_draw or news is not None or time.monotonic() - drawn_at >= 1.0:
                    self._state.trouble = trouble
                    self._draw()
                    drawn_at = time.monotonic()
                key = self._key()
                is_to_draw = bool(key)
                action = self._state.press(key) if key and key != "redraw" else key
                if action == "quit":
                    return
                if action == "refresh":
                    poller.poll_now()
                if action == "redraw":
                    self._window.clear()
        finally:
            poller.close()

    def _take(self, view: PoolView) -> None:
        with self._lock:
            self._news, self._trouble = view, ""

    def _fail(self, sentence: str) -> None:
        with self._lock:
            self._trouble = sentence

    def _key(self) -> str:
        """Return the key's name; "" if no key was pressed within a turn."""
        try:
            pressed = self._window.get_wch()
        except curses.error:
            return ""
        if isinstance(pressed, int):
            return _KEYS.get(pressed, "")
        return _CHARACTERS.get(pressed, pressed)

    def _draw(self) -> None:
        lines, columns = self._window.getmaxyx()
        self._window.erase()
        for number, line in enumerate(frame(self._state, Size(columns, lines), time.time())):
            self._draw_line(number, line)
        self._window.refresh()

    def _draw_line(self, number: int, line: Line) -> None:
        column = 0
        for text, style in line:
            # The cursor cannot move past the last cell of the screen, which curses reports as an
            # error.
            with contextlib.suppress(curses.error):
                self._window.addstr(number, column, self._encodable(text), self._attributes[style])
            column += cell_count(text)

    def _encodable(self, text: str) -> str:
        encoding = self._window.encoding
        return text.encode(encoding, "replace").decode(encoding)
