# SPDX-License-Identifier: Apache-2.0
"""Which call hands which bytes to which (csrc/graph/call_flow.h). Whoever captured the calls knows
the sizes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock import _C
from penstock.graph.lowering import Lowering
from penstock.graph.plan import PlannedEdge
from penstock.graph.sizes import evaluate

# By value: its bytes, and the number of the memory that it shares with others of that number. A
# value whose size is not known is left out.
Extents = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CallFlow:
    """`made_bytes` is by group: memory that the group's calls allocate and others read."""

    made_bytes: Mapping[int, int]
    edges: tuple[PlannedEdge, ...]


def recorded_extents(lowering: Lowering, inputs: Sequence[Any]) -> Extents:
    """The extents of all tensors of a recording, for the sizes of `inputs`."""
    values = lowering.conditions.values(lowering.conditions.sizes(inputs))
    extents: dict[str, tuple[int, int]] = {}
    for name, form in lowering.recording.forms.items():
        try:
            sizes = [evaluate(size, values) for size in form.sizes]
            strides = [evaluate(stride, values) for stride in form.strides]
        except (TypeError, ValueError):
            continue  # a size that only the values of a tensor decide
        if 0 in sizes:
            count = 0
        elif strides:  # an expanded dimension repeats its bytes
            count = prod(s for s, stride in zip(sizes, strides, strict=True) if stride)
        else:
            count = prod(sizes)
        extents[name.bare] = (count * form.dtype.itemsize, form.storage)
    return extents


def read_flow(graph: _C.Graph, extents: Extents) -> CallFlow:
    """The flow of the graph's calls."""
    made_bytes, edges = graph.flow(extents)
    return CallFlow(
        made_bytes,
        tuple(PlannedEdge(source, target, size, leaf) for source, target, leaf, size in edges),
    )
