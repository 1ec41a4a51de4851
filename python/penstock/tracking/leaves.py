# SPDX-License-Identifier: Apache-2.0
"""The order in which the tensors of a batch are numbered.

The loader writes the tensors of a batch in this order, the trainer tells them apart by it, and the
text of a prefix names them by it (`leaf 3`). So there is one function, used by all of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, MutableMapping
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
    _walk(batch, leaves, set())
    return leaves


# Functions beside one another, not inside: one that calls itself by way of a closure is a cycle,
# and would keep the tensors until the next collection of garbage.


def _walk(item: Any, leaves: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(item, torch.Tensor):
        if id(item) not in seen:
            seen.add(id(item))
            leaves.append(item)
    elif isinstance(item, Mapping):
        for value in item.values():
            _walk(value, leaves, seen)
    elif isinstance(item, (list, tuple)):
        for value in item:
            _walk(value, leaves, seen)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            _walk(getattr(item, field.name), leaves, seen)


def replace_leaves(batch: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """The batch with `replacements`, which are by the id of the leaf, in the places where
    `flatten_batch` finds leaves.

    Mappings, lists and dataclass instances are changed, tuples and namedtuples made anew. An object
    whose class has its own way of being written to keeps its leaves: it may refuse, and it may do
    more than store the value.
    """
    if isinstance(batch, torch.Tensor):
        return replacements.get(id(batch), batch)
    if type(batch) is tuple:
        return tuple(replace_leaves(value, replacements) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(replace_leaves(value, replacements) for value in batch)
    for place, value in _places(batch):
        new = replace_leaves(value, replacements)
        if new is not value and _stores_as_usual(batch, place):
            if isinstance(batch, (MutableMapping, list)):
                batch[place] = new
            else:
                setattr(batch, place, new)
    return batch


def _places(batch: Any) -> list[tuple[Any, Any]]:
    """The items of a batch, or its fields, by their places."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return []


def _stores_as_usual(batch: Any, place: Any) -> bool:
    """Whether a write to this place stores the value, and does no more."""
    kind: Any = type(batch)
    if isinstance(batch, (Mapping, list)):
        return getattr(kind, "__setitem__", None) in _USUAL
    return kind.__setattr__ is object.__setattr__ and not hasattr(
        getattr(kind, place, None), "__get__"
    )


_USUAL = tuple(
    one.__setitem__ for one in (dict, list, collections.OrderedDict, collections.UserDict)
)
