# SPDX-License-Identifier: Apache-2.0
"""Delay Ctrl-C while a worker is being forked, in both processes.

Python runs hooks around a fork and discards their exceptions. An interrupt during a hook is lost:
by a child, which then serves a trainer that has given up, or by the trainer, which continues
training. An interrupt between the fork and the registration of the child at the trainer leaves a
child that is never ended. ``spawn`` and a fork server have no such hooks, and their children end by
themselves if they are not sent their work.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_held: list[HeldInterrupt] = []  # at most the context in which this process was forked


class HeldInterrupt:
    """A context that records SIGINT; the signal takes effect at the end of the context.

    A child that is forked in the context calls `release_in_child`. Only the main thread is
    interrupted, so in other threads this has no effect; nor if SIGINT is ignored or has the
    system's default action.
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
        """Restore SIGINT's handler, and call it if the signal was recorded, which may raise."""
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
    """End the context in which this process was forked; raise as its end does."""
    while _held:
        _held[-1].release()
