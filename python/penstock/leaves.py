# SPDX-License-Identifier: Apache-2.0
"""The order in which the tensors of a batch are numbered.

The loader writes the tensors of a batch in this order, the trainer tells them apart by it, and the
text of a prefix names them by it (`leaf 3`). So there is one function, used by all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def flatten_batch(batch: Any) -> list[torch.Tensor]:
    """Lists the tensors of `batch`, depth first, each distinct tensor object once, at its first
    place.

    Mappings are walked in insertion order, lists, tuples and namedtuples from left to right, and
    dataclass instances field by field. Anything else that is not a tensor holds no leaves.

        >>> x = torch.zeros(2)
        >>> [leaf.shape[0] for leaf in flatten_batch({"a": x, "b": [torch.zeros(3), x]})]
        [2, 3]
    """
    leaves: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                leaves.append(item)
        elif isinstance(item, Mapping):
            for value in item.values():
                walk(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                walk(value)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            for field in dataclasses.fields(item):
                walk(getattr(item, field.name))

    walk(batch)
    return leaves


def replace_leaves(batch: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """The batch with `replacements`, which are by the id of the leaf, in the places where
    `flatten_batch` finds leaves.

    Mappings, lists and dataclass instances are changed, tuples and namedtuples made anew. What
    cannot be changed keeps its leaves.
    """

    def replaced(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return replacements.get(id(item), item)
        if isinstance(item, MutableMapping):
            for key, value in list(item.items()):
                change(item.__setitem__, key, value)
        elif isinstance(item, list):
            for index, value in enumerate(item):
                change(item.__setitem__, index, value)
        elif type(item) is tuple:
            return tuple(replaced(value) for value in item)
        elif isinstance(item, tuple) and hasattr(item, "_make"):
            return item._make(replaced(value) for value in item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            for field in dataclasses.fields(item):
                change(functools.partial(setattr, item), field.name, getattr(item, field.name))
        return item

    def change(put: Callable[[Any, Any], None], place: Any, value: Any) -> None:
        new = replaced(value)
        if new is not value:
            with contextlib.suppress(AttributeError, TypeError, KeyError, ValueError):
                put(place, new)

    return replaced(batch)
