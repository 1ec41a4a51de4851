# SPDX-License-Identifier: Apache-2.0
"""Detect samples that draw random numbers while they are made.

A sample that is served from a cache makes no draws, so it would be the same in each epoch, and
generators would be left in another state than without the cache.
"""

from __future__ import annotations

import threading
from typing import Any

from penstock.stream.batch_seeds import generator_states, have_moved
from penstock.worker.fingerprint import state_of_generator
from penstock.worker.reachable import generators_in


class DrawWatch:
    """Compares generators with their states when this object was made: the global ones, and those
    found in attributes of ``dataset``."""

    def __init__(self, dataset: Any) -> None:
        self._own = [(one, state_of_generator(one)) for one in generators_in(dataset)]
        self._global = generator_states()

    def has_own_moved(self) -> bool:
        return any(state != state_of_generator(one) for one, state in self._own)

    def has_global_moved(self) -> bool:
        return have_moved(self._global)


def are_others_drawing() -> bool:
    """Return whether another thread may draw from the global generators at the same time: samples
    are then fetched on several threads, of which this is one."""
    return threading.current_thread() is not threading.main_thread()
