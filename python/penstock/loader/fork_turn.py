# SPDX-License-Identifier: Apache-2.0
"""Threads of this process fork one after the other.

What other packages do before a fork may not bear another thread's fork in between: filelock 4.3
raises RuntimeError from it.
"""

from __future__ import annotations

import os
import threading


class ForkTurn:
    """A context in which no other thread is, to start a child by fork in."""

    _lock = threading.RLock()

    def __enter__(self) -> None:
        self._held = ForkTurn._lock
        self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()

    @classmethod
    def _renew(cls) -> None:
        cls._lock = threading.RLock()  # another thread of the parent may hold the one before


os.register_at_fork(after_in_child=ForkTurn._renew)
