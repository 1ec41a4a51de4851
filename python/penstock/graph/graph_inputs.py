# SPDX-License-Identifier: Apache-2.0
"""The inputs of a captured graph: the meaning of each placeholder, and arguments without values
whose sizes stay open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from penstock.graph.sizes import SizeBinding, SizeConditions
from penstock.seams.fake_tensors import ConstantSource, FakeTensorMode

# A "made" one is computed in the graph itself, by an expression in front of the captured calls.
InputKind = Literal["leaf", "const", "state", "int", "made"]


@dataclass(frozen=True)
class GraphInput:
    kind: InputKind
    label: str  # how Dynamo names the source: L['self']._buffers['mean']
    leaf_index: int = -1
    dynamic_dims: tuple[int, ...] = ()
    size_of: tuple[int, int] | None = None  # an int that is this dimension of that input


def fake_inputs(
    mode: FakeTensorMode, inputs: Sequence[GraphInput], examples: Sequence[Any], symbolic: bool
) -> tuple[list[Any], SizeConditions]:
    """Arguments of `mode` for a captured graph, and the conditions under which the graph does the
    same with others. With `symbolic`, dynamic dimensions of leaves are symbols."""
    arguments: list[Any] = [None] * len(inputs)
    conditions = SizeConditions([], [])
    for index, (item, example) in enumerate(zip(inputs, examples, strict=True)):
        if item.kind in ("int", "made"):
            continue
        if not (symbolic and item.kind == "leaf" and item.dynamic_dims):
            arguments[index] = mode.from_tensor(example, static_shapes=True)
            conditions.fixed_sizes += [(index, d, example.shape[d]) for d in item.dynamic_dims]
            continue
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[
                DimDynamic.DYNAMIC if dim in item.dynamic_dims else DimDynamic.STATIC
                for dim in range(example.dim())
            ]
        )
        source = ConstantSource(f"leaf{item.leaf_index}")
        fake = mode.from_tensor(example, source=source, symbolic_context=context)
        arguments[index] = fake
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                conditions.bindings.append(SizeBinding(size.node.expr, index, dim))
            elif dim in item.dynamic_dims:
                conditions.fixed_sizes.append((index, dim, example.shape[dim]))
    for index, (item, example) in enumerate(zip(inputs, examples, strict=True)):
        if item.kind == "leaf":
            conditions.strides.append((index, tuple(arguments[index].stride())))
        if item.kind != "int":
            continue
        if item.size_of is not None:
            base, dim = item.size_of
            arguments[index] = arguments[base].shape[dim]
        else:
            arguments[index] = int(example)
            conditions.fixed_ints.append((index, int(example)))
    return arguments, conditions
