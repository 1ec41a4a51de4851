# SPDX-License-Identifier: Apache-2.0
"""Warn about batches that a loader has to unpickle, if that takes a noticeable part of its time.

A batch without pickle costs the trainer no more than its values do. What has no form in a batch
but a pickle (`bindings/python_nest.h`) is made again by the trainer's thread, while training waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock import _C
from penstock.program_line import warn
from penstock.stream import batch_types
from penstock.worker import batch_pickle

WINDOW_BATCHES = 16  # that are measured before the first warning
SHARE_MIN = 0.05  # of the time from batch to batch
UNPICKLING_S_MIN = 1e-3  # a batch
_DEPTH_MAX = 64


class Pickled(NamedTuple):
    """A part of a batch that has no other form than a pickle.

    Attributes:
        where (str): Its place, such as ``batch['graph']``.
        what (str): What it is, with an article: a class by its whole name.
        remedy (str): What to do, as a clause.
    """

    where: str
    what: str
    remedy: str


class PickleWatch:
    """Counts the time of unpickling, and warns once for each type. Confined to the trainer's
    thread.

    Args:
        clock (Callable[[], float]): Returns seconds. Default: time.monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._warned: set[str] = set()
        self._begun_at = self._unpickling_s = 0.0
        self._count = self._bytes = 0

    def loads(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
        """Rebuild a batch as `batch_pickle.loads` does, and warn if it has taken long."""
        began_at = self._clock()
        batch = batch_pickle.loads(data, tensors)
        if self._count == 0:
            self._begun_at = began_at
        elif self._count == WINDOW_BATCHES:
            self._end_window(batch, began_at - self._begun_at)
            self._begun_at, self._count, self._bytes, self._unpickling_s = began_at, 0, 0, 0.0
        self._count += 1
        self._bytes += len(data)
        self._unpickling_s += self._clock() - began_at
        return batch

    def _end_window(self, batch: Any, passed_s: float) -> None:
        of_batch_s = self._unpickling_s / self._count
        share = self._unpickling_s / max(passed_s, self._unpickling_s)
        if of_batch_s < UNPICKLING_S_MIN or share < SHARE_MIN:
            return
        found = find_pickled(batch)
        if found is None or found.what in self._warned:
            return
        self._warned.add(found.what)
        warn(
            f"{found.where} is {found.what}, so batches are pickled: "
            f"{_format_bytes(self._bytes / self._count)} and {1e3 * of_batch_s:.1f} ms a batch in "
            f"the trainer, {100 * share:.0f} % of its time; {found.remedy}",
            UserWarning,
        )


def find_pickled(batch: Any) -> Pickled | None:
    """Return the first part of a local worker's batch that makes it a pickle; None if there is
    none."""
    return _find(batch, "batch", 0, set())


def _find(value: Any, where: str, depth: int, seen: set[int]) -> Pickled | None:
    cls = type(value)
    if value is None or cls in (bool, float, bytes):
        return None
    if cls is int:
        if -(2**63) <= value < 2**63:
            return None
        return Pickled(where, "an int of more than 64 bits", "return it as text")
    if cls is str:
        is_odd = any("\ud800" <= letter <= "\udfff" for letter in value)
        return Pickled(where, "a str with surrogates", "return it as bytes") if is_odd else None
    if cls is torch.Tensor and _C.is_plain_tensor(value):
        return None
    if depth + 1 >= _DEPTH_MAX:
        return Pickled(where, f"nested {_DEPTH_MAX} levels deep", "return it flat")
    if id(value) in seen and (cls is not list and cls is not tuple or len(value) > 0):
        what = f"the same {_name_of(cls)} as an earlier part"
        return Pickled(where, what, "return it once, or copies of it")
    seen.add(id(value))
    parts: list[tuple[str, Any]]
    if cls in (list, tuple):
        parts = [(f"[{index}]", one) for index, one in enumerate(value)]
    elif cls is dict:
        parts = [(f"[{key!r}]", one) for key, one in value.items()]
        for key in value:
            if isinstance(key, torch.Tensor) or _find(key, where, depth + 1, set()) is not None:
                what = f"a dict with a key of the class {_name_of(type(key))}"
                return Pickled(where, what, "use str or int as keys")
    else:
        flat = batch_types.flatten(value, True)
        if flat is None:
            return Pickled(where, f"of the class {_name_of(cls)}", _remedy(value))
        parts = [(".content", one) for one in flat[1]]
    for place, one in parts:
        found = _find(one, where + place, depth + 1, seen)
        if found is not None:
            return found
    return None


def _name_of(cls: type) -> str:
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"


def _remedy(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "return a detached torch.Tensor of the CPU"
    if isinstance(value, (np.ndarray, np.generic)):
        return "return a torch.Tensor, as torch.from_numpy() makes it"
    name = type(value).__qualname__
    return (
        f"call penstock.register_batch_type({name}, flatten, unflatten) before the loader starts "
        "its workers to send it without pickle"
    )


def _format_bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
