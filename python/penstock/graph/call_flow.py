# SPDX-License-Identifier: Apache-2.0
"""Which call hands which bytes to which (csrc/graph/call_flow.h), and on which device. Whoever
captured the calls knows the sizes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """`made_bytes` and `devices` are by group: memory that the group's calls allocate and others
    read, and the device of their results if that is not the CPU."""

    made_bytes: Mapping[int, int]
    edges: tuple[PlannedEdge, ...]
    devices: Mapping[int, str] = field(default_factory=dict)


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


def recorded_devices(lowering: Lowering) -> dict[int, str]:
    """By unit of a recording, the device of its results if that is not the CPU."""
    return {
        lowering.unit_of[op.call_index]: str(lowering.recording.forms[name].device)
        for op in lowering.recording.ops
        for name in op.outputs
        if name in lowering.recording.forms and lowering.recording.forms[name].device.type != "cpu"
    }


def read_flow(
    graph: _C.Graph, extents: Extents, devices: Mapping[int, str] | None = None
) -> CallFlow:
    """The flow of the graph's calls."""
    made_bytes, edges = graph.flow(extents)
    return CallFlow(
        made_bytes,
        tuple(PlannedEdge(source, target, size, leaf) for source, target, leaf, size in edges),
        devices or {},
    )
