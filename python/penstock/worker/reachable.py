# SPDX-License-Identifier: Apache-2.0
"""Find objects of given classes in a dataset, such as random generators: in its attributes and in
small containers there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_ITEMS_MAX = 64  # of a container that is searched
_DEPTH_MAX = 5
_OBJECTS_MAX = 500
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def reachable(value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield the objects of ``kinds`` in ``value``, itself included, each once.

    Objects in attributes, dicts, lists and tuples are found up to 5 levels deep, in containers of
    up to 64 items and among the first 500 objects. Objects that were found are searched, too.
    """
    yield from _found(value, kinds, _DEPTH_MAX, set())


def generators_in(dataset: Any) -> list[Any]:
    """Return the random generators in a dataset, except system generators."""
    found = reachable(dataset, _GENERATORS)
    return [one for one in found if not isinstance(one, random.SystemRandom)]


def _found(value: Any, kinds: type | tuple[type, ...], depth: int, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen or len(seen) >= _OBJECTS_MAX:
        return
    if isinstance(value, kinds):
        seen.add(id(value))
        yield value
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
            yield from _found(part, kinds, depth - 1, seen)
