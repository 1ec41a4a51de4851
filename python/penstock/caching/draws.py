# SPDX-License-Identifier: Apache-2.0
"""Detect samples that draw random numbers while they are made.

A sample that is served from a cache makes no draws, so it would be the same in each epoch, and
generators would be left in another state than without the cache.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.stream.batch_seeds import generator_states, have_moved
from penstock.worker.fingerprint import state_of_generator

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ITEMS_MAX = 64  # of a container that is searched for generators
_DEPTH_MAX = 5
_OBJECTS_MAX = 500


class DrawWatch:
    """Compares generators with their states when this object was made: the global ones, and those
    found in attributes of ``dataset``."""

    def __init__(self, dataset: Any) -> None:
        own = _generators_in(dataset, _DEPTH_MAX, set())
        self._own = [(one, state_of_generator(one)) for one in own]
        self._global = generator_states()

    def has_own_moved(self) -> bool:
        return any(state != state_of_generator(one) for one, state in self._own)

    def has_global_moved(self) -> bool:
        return have_moved(self._global)


def are_others_drawing() -> bool:
    """Return whether another thread may draw from the global generators at the same time: samples
    are then fetched on several threads, of which this is one."""
    return threading.current_thread() is not threading.main_thread()


def _generators_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the generators that are reachable through attributes and small containers."""
    if id(value) in seen or len(seen) >= _OBJECTS_MAX:
        return
    if isinstance(value, _GENERATORS):
        seen.add(id(value))
        if not isinstance(value, random.SystemRandom):
            yield value
        return
    if isinstance(value, dict):
        parts: Any = value.values() if len(value) <= _ITEMS_MAX else ()
    elif isinstance(value, (list, tuple)):
        parts = value if len(value) <= _ITEMS_MAX else ()
    else:
        parts = getattr(value, "__dict__", {}).values() if not isinstance(value, type) else ()
    if not parts or depth == 0:
        return
    seen.add(id(value))
    for part in tuple(parts):
        if not isinstance(part, (str, bytes, int, float, type(None))):
            yield from _generators_in(part, depth - 1, seen)
