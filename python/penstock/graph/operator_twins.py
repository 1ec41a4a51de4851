# SPDX-License-Identifier: Apache-2.0
"""Which operator may stand for which: functional ones for writes, scalar ones for numbers."""

from __future__ import annotations

from typing import Any

import torch

from penstock.seams.operators import OpOverload, schema_of
from penstock.seams.trees import tree_leaves

aten = torch.ops.aten

# These write to arguments that their schemas do not mark: (operator, arguments, flag that turns it
# on).
HIDDEN_WRITES: dict[OpOverload, tuple[tuple[int, ...], int]] = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
    aten._batch_norm_impl_index.default: ((3, 4), 5),
    aten._native_batch_norm_legit.default: ((3, 4), 5),
}

# Writes that only change how memory is looked at; the twin is a view.
METADATA_TWINS: dict[OpOverload, OpOverload] = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
}


def functional_twin(func: OpOverload) -> OpOverload | None:
    """`aten::sub.Tensor` for `aten::sub_.Tensor`: same arguments, same result, nothing written."""
    if func in METADATA_TWINS:
        return METADATA_TWINS[func]
    namespace, _, base = schema_of(func).name.partition("::")
    if (
        namespace != "aten"
        or not base.endswith("_")
        or torch.Tag.nondeterministic_seeded in func.tags
    ):
        return None
    packet = getattr(aten, base[:-1], None)
    wanted = [(a.name, str(a.type)) for a in schema_of(func).arguments]
    # Mostly the overload has the same name. `pow_.Scalar` goes with `pow.Tensor_Scalar`.
    for name in packet.overloads() if packet is not None else ():
        overload: OpOverload = getattr(packet, name)
        arguments = [(a.name, str(a.type)) for a in schema_of(overload).arguments]
        if arguments == wanted and not schema_of(overload).is_mutable:
            return overload
    return None


def with_numbers(func: OpOverload, args: list[Any]) -> OpOverload:
    """`aten::sub.Scalar` for `aten::sub.Tensor` where Python numbers stand for tensors.

    Python's bindings wrap such a number in a tensor, and so do these overloads.
    """
    types = [str(argument.type) for argument in schema_of(func).arguments]
    wanted = [
        "number" if kind == "Tensor" and isinstance(arg, (int, float)) else kind
        for kind, arg in zip(types, args, strict=False)
    ] + types[len(args) :]
    if wanted == types:
        return func
    names = [argument.name for argument in schema_of(func).arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        overload: OpOverload = getattr(packet, name)
        arguments = schema_of(overload).arguments
        if [str(a.type) for a in arguments] == wanted and [a.name for a in arguments] == names:
            return overload
    return func


def written_arguments(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that `func` writes to, by its schema or by what is known about it."""
    written: list[torch.Tensor] = []

    def add(value: Any) -> None:
        written.extend(t for t in tree_leaves(value) if isinstance(t, torch.Tensor))

    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            add(args[position] if position < len(args) else kwargs.get(argument.name))
    if func in HIDDEN_WRITES:
        positions, flag = HIDDEN_WRITES[func]
        if flag < len(args) and args[flag]:
            for position in positions:
                add(args[position])
    return written


def operator_name(func: OpOverload) -> str:
    overload = schema_of(func).overload_name
    return f"{schema_of(func).name}.{overload}" if overload else str(schema_of(func).name)
