# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory that a user holds from being overwritten in a process that was forked off.

Slabs of this process and of its children are the same pages. Before it forks, the clients retire
those that somebody holds. `os.register_at_fork` has no way to take a hook back, so there is one for
all of them.
"""

from __future__ import annotations

import os
import weakref

from penstock import _C

_live_clients: weakref.WeakSet[_C.Client] = weakref.WeakSet()


def retire_at_forks(client: _C.Client) -> None:
    """Has the slabs of `client` that are held when this process forks used for no other batch."""
    _live_clients.add(client)


def _retire_held_slabs() -> None:
    for client in list(_live_clients):
        client.retire_held()


os.register_at_fork(before=_retire_held_slabs)
