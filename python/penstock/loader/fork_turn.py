# SPDX-License-Identifier: Apache-2.0
"""Threads of this process fork one after the other.

What other packages do before a fork may not bear another thread's fork in between: filelock 4.3
raises RuntimeError from it.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_turn = threading.RLock()


def fork_turn() -> AbstractContextManager[bool]:
    """A context in which no other thread is, to start a child by fork in."""
    return _turn


def _renew_turn() -> None:
    global _turn
    _turn = threading.RLock()  # another thread of the parent may hold the one before


os.register_at_fork(after_in_child=_renew_turn)
