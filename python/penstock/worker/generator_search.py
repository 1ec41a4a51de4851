# SPDX-License-Identifier: Apache-2.0
"""Find the random generators that a dataset has in its attributes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ITEMS_MAX = 64  # of a container that is searched
_DEPTH_MAX = 5
_OBJECTS_MAX = 500


def generators_in(value: Any) -> Iterator[Any]:
    """Yield the generators that are reachable through attributes and small containers."""
    return _generators_in(value, _DEPTH_MAX, set())


def _generators_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
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
