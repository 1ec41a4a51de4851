# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call of an operator as a flat list, and put together again.

An operator of ATen takes scalars, tensors, and lists of them, and no nests. So torch's trees are
not needed, whose work a training step would do for each operator that waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# For each argument, in order: the length of a list, None for anything else; for what is given by
# name, the name before that.
Form = tuple[int | str | None, ...]


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Form]:
    """The operands, those in lists among them, and the form of the call."""
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
    """The arguments of a call of that form with these operands."""
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
