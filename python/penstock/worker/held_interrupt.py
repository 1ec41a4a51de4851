# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a worker is forked waits until the fork is over, on both sides.

Python runs hooks around a fork and drops their exceptions. An interrupt that falls into one is
lost: by a child, which serves a trainer that has given up, or by the trainer, which trains on. One
that falls between the fork and the moment in which the trainer knows the child leaves a child that
nobody ends. ``spawn`` and a fork server have no such hooks, and their children end by themselves
when nobody sends them their work.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_held: list[HeldInterrupt] = []  # at most the one within which this process was forked


class HeldInterrupt:
    """While in the context, SIGINT is noted; at its end the signal takes its effect.

    A child that is forked within it calls `release_in_child`. Only the main thread is interrupted,
    so elsewhere this does nothing, nor where SIGINT is ignored or the system's to handle.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._is_noted = False

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            _held.append(self)
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Raises the exception of SIGINT's handler, if there was one."""
        if self._handler is None:
            return
        handler, self._handler = self._handler, None
        _held.remove(self)
        signal.signal(signal.SIGINT, handler)
        if self._is_noted:
            handler(signal.SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted, self._frame = True, frame


def release_in_child() -> None:
    """Ends the context that this process was forked in; raises as its end does."""
    while _held:
        _held[-1].release()
