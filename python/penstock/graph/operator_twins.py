# SPDX-License-Identifier: Apache-2.0
"""Which operator may stand for which: functional ones for writes, scalar ones for numbers.

The decisions, and the operators that they are made for, are in csrc/capture/operator_twins.h.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from penstock import _C
from penstock.seams.operators import OpOverload, schema_of
from penstock.seams.trees import tree_leaves


class Twin(NamedTuple):
    """An operator that computes the values that another writes."""

    operator: OpOverload
    is_view_alone: bool  # the write changes how memory is looked at, and no data


@functools.cache
def functional_twin(func: OpOverload) -> Twin | None:
    """`aten::sub.Tensor` for `aten::sub_.Tensor`: same arguments, same result, nothing written."""
    found = _C.functional_twin(operator_name(func))
    return None if found is None else Twin(_overload(found[0]), found[1])


def with_numbers(func: OpOverload, args: list[Any]) -> OpOverload:
    """`aten::sub.Scalar` for `aten::sub.Tensor` where Python numbers stand for tensors."""
    places = frozenset(i for i, arg in enumerate(args) if isinstance(arg, (int, float)))
    return _with_numbers_at(func, places) if places else func


@functools.cache
def _with_numbers_at(func: OpOverload, places: frozenset[int]) -> OpOverload:
    name = _C.overload_with_numbers(operator_name(func), places)
    return func if name is None else _overload(name)


def written_arguments(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that `func` writes to, by its schema or by our own list."""
    written: list[torch.Tensor] = []
    for position, flag in _written(func):
        if flag is None or _argument(func, flag, args, kwargs) is not False:
            leaves = tree_leaves(_argument(func, position, args, kwargs))
            written.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return written


@functools.cache
def _written(func: OpOverload) -> list[tuple[int, int | None]]:
    return _C.written_arguments(operator_name(func))


def _argument(func: OpOverload, position: int, args: Any, kwargs: Any) -> Any:
    if position < len(args):
        return args[position]
    return kwargs.get(schema_of(func).arguments[position].name)


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def operator_name(func: OpOverload) -> str:
    overload = schema_of(func).overload_name
    return f"{schema_of(func).name}.{overload}" if overload else str(schema_of(func).name)
