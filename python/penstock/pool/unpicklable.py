# SPDX-License-Identifier: Apache-2.0
"""Find the part of a dataset that cannot be pickled, for a message that names it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penstock.pool.job_pickle import pickle_into

_BYTES_MAX = 256 << 20  # pickled during the search in total: some seconds
_TRIES_MAX = 2000
_ITEMS_MAX = 200  # examined per container
_DEPTH_MAX = 12


class Unpicklable(NamedTuple):
    path: str  # such as "dataset.index['connection']"
    value: Any


def find_unpicklable(roots: Mapping[str, Any]) -> Unpicklable | None:
    """Return the innermost part, below one of ``roots``, that cannot be pickled.

    Return None if it was not found within a bounded number of tries.
    """
    search = _Search()
    for name, root in roots.items():
        if search.fails(root):
            whole = Unpicklable(name, root)
            return search.innermost(whole) or whole
    return None


class _EnoughError(Exception):
    """The search has pickled as much as it may."""


class _Search:
    def __init__(self) -> None:
        self._bytes_left = _BYTES_MAX
        self._tries_left = _TRIES_MAX
        self._seen: dict[int, Any] = {}  # by id, kept alive so that ids stay unique
        self._failed: set[int] = set()

    def write(self, data: Any) -> None:
        self._bytes_left -= memoryview(data).nbytes
        if self._bytes_left < 0:
            raise _EnoughError

    def fails(self, value: Any) -> bool:
        """Return whether the value cannot be pickled and was not examined before."""
        if self._bytes_left < 0 or self._tries_left == 0:
            return False
        self._tries_left -= 1
        self._seen[id(value)] = value
        try:
            pickle_into(self, value)
        except _EnoughError:
            return False
        except Exception:  # the reduction of a part may raise anything
            self._failed.add(id(value))
            return True
        return False

    def innermost(self, whole: Unpicklable, depth: int = 0) -> Unpicklable | None:
        """Return the innermost failing part; None if it fails only by a reference back to an object
        that is being examined."""
        if depth == _DEPTH_MAX:
            return whole
        leads_back = False
        for part in _parts(whole):
            if id(part.value) in self._seen:
                leads_back |= id(part.value) in self._failed
            elif self.fails(part.value):
                found = self.innermost(part, depth + 1)
                if found is not None:
                    return found
                leads_back = True
        return None if leads_back else whole


def _parts(whole: Unpicklable) -> Iterator[Unpicklable]:
    """Yield the objects that pickle would follow from this one; none if the object cannot be
    examined.
    """
    try:
        yield from _parts_of(whole.path, whole.value)
    except Exception:
        return


def _parts_of(path: str, value: Any) -> Iterator[Unpicklable]:
    if isinstance(value, dict):
        for key, item in list(value.items())[:_ITEMS_MAX]:
            yield Unpicklable(f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:_ITEMS_MAX]):
            yield Unpicklable(f"{path}[{index}]", item)
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield Unpicklable(f"{path}.{name}", getattr(value, name))
    elif isinstance(value, types.MethodType):
        yield Unpicklable(f"{path}.__self__", value.__self__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield Unpicklable(path, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(path, value)
        return
    own = vars(value) if hasattr(value, "__dict__") else {}
    for name, item in list(own.items())[:_ITEMS_MAX]:
        yield Unpicklable(f"{path}.{name}", item)
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield Unpicklable(f"{path}.{name}", getattr(value, name))
    if not isinstance(value, type):
        yield Unpicklable(path, type(value))


def _parts_of_function(path: str, function: types.FunctionType) -> Iterator[Unpicklable]:
    names = inspect.getclosurevars(function)
    for name, item in names.nonlocals.items():
        yield Unpicklable(f"{path} -> the variable {name}", item)
    for name, item in names.globals.items():
        yield Unpicklable(f"{path} -> the global {name}", item)
    for item in function.__defaults__ or ():
        yield Unpicklable(f"{path} -> a default", item)
