# SPDX-License-Identifier: Apache-2.0
"""Flatten batches and calls: the leaves of a batch, and the operands of a call.

The loader writes the tensors of a batch in the order of :func:`flatten_batch`, the trainer
identifies them by it, and the text of a prefix names them by it (`leaf 3`). So all of them use the
same function.

The arguments of an operator call are flattened by :func:`flatten_call` and reassembled by
:func:`call_of`. ATen operators take scalars, tensors, and lists of them, but no nests. So torch's
trees are not needed, which would cost time for each deferred operator of a training step.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

_USUAL = tuple(
    one.__setitem__ for one in (dict, list, collections.OrderedDict, collections.UserDict)
)


def flatten_batch(batch: Any) -> list[torch.Tensor]:
    """List the tensors of `batch`, depth first, each distinct object once, at its first place.

    Mappings are walked in insertion order, lists, tuples and namedtuples from left to right, and
    dataclass instances field by field. Anything else that is not a tensor holds no leaves.

        >>> x = torch.zeros(2)
        >>> [leaf.shape[0] for leaf in flatten_batch({"a": x, "b": [torch.zeros(3), x]})]
        [2, 3]
    """
    leaves: list[torch.Tensor] = []
    _walk(batch, leaves, set())
    return leaves


# Separate functions instead of nested ones: a nested function that calls itself by way of a closure
# is a cycle, and would keep the tensors until the next garbage collection.
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
    """Return the batch with `replacements`, by the id of the leaf, in place of its leaves.

    The leaves are found as in `flatten_batch`. Mappings, lists and dataclass instances are changed,
    tuples and namedtuples are made again. An object whose class has a special write method keeps
    its leaves: the method may refuse, and it may do more than store the value.
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
    """Return the items of a batch, or its fields, by their places."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return []


def _stores_as_usual(batch: Any, place: Any) -> bool:
    """Return whether a write to this place only stores the value."""
    kind: Any = type(batch)
    if isinstance(batch, (Mapping, list)):
        return getattr(kind, "__setitem__", None) in _USUAL
    return kind.__setattr__ is object.__setattr__ and not hasattr(
        getattr(kind, place, None), "__get__"
    )


# For each argument, in order: the length of a list, None for anything else; for keyword arguments,
# preceded by the name.
Form = tuple[int | str | None, ...]


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Form]:
    """Return the operands, including the ones in lists, and the form of the call."""
    operands: list[Any] = []
    form: list[int | str | None] = []
    for item in args:
        _add(item, operands, form)
    for name, item in kwargs.items():
        form.append(name)
        _add(item, operands, form)
    return operands, tuple(form)


def _add(item: Any, operands: list[Any], form: list[int | str | None]) -> None:
    if isinstance(item, (list, tuple)):
        operands.extend(item)
        form.append(len(item))
    else:
        operands.append(item)
        form.append(None)


def call_of(operands: Sequence[Any], form: Form) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of that form with these operands."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    name, begin = None, 0
    for length in form:
        if isinstance(length, str):
            name = length
            continue
        end = begin + (1 if length is None else length)
        item = operands[begin] if length is None else list(operands[begin:end])
        begin = end
        if name is None:
            args.append(item)
        else:
            kwargs[name] = item
            name = None
    return tuple(args), kwargs
