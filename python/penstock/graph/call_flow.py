# SPDX-License-Identifier: Apache-2.0
"""Which call hands which bytes to which: what a plan says beside places and prices.

It is read from the text of the graph, which is the same for both front ends; how large the tensors
are comes from whoever captured them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.graph.lowering import Lowering
from penstock.graph.plan import PlannedEdge
from penstock.graph.sizes import evaluate

QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
NAME = re.compile(r"%\w+")
LEAF = re.compile(r"input (?P<name>%\S+) leaf (?P<index>\d+) ")
CALL = re.compile(
    r"(?:(?P<results>%.*) = )?(?P<operator>[^\s(]+)\((?P<arguments>.*)\) group (?P<group>\d+)"
)
# These look at sizes alone: no bytes go to them.
SIZE_OPERATORS = "size::"


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """How many bytes a tensor has, and which tensors share them: equal storage, same memory."""

    bytes: int
    storage: int


Extents = Mapping[str, TensorExtent]  # by name, for the tensors whose size is known


@dataclass(frozen=True, slots=True)
class CallFlow:
    """`made_bytes` is by group: memory that the group's calls allocate and others read."""

    made_bytes: Mapping[int, int]
    edges: tuple[PlannedEdge, ...]


def recorded_extents(lowering: Lowering, inputs: Sequence[Any]) -> dict[str, TensorExtent]:
    """The extents of all tensors of a recording, for the sizes of `inputs`."""
    values = lowering.conditions.values(lowering.conditions.sizes(inputs))
    extents: dict[str, TensorExtent] = {}
    for name, form in lowering.recording.forms.items():
        try:
            sizes = [evaluate(size, values) for size in form.sizes]
            strides = [evaluate(stride, values) for stride in form.strides]
        except (TypeError, ValueError):
            continue  # a size that only the values of a tensor decide
        if 0 in sizes:
            count = 0
        elif strides:  # what is expanded repeats its bytes
            count = prod(s for s, stride in zip(sizes, strides, strict=True) if stride)
        else:
            count = prod(sizes)
        extents[str(name)] = TensorExtent(count * form.dtype.itemsize, form.storage)
    return extents


def read_flow(text: str, extents: Extents) -> CallFlow:
    """The flow of the graph that `text` writes down."""
    leaf_of: dict[str, int] = {}
    group_of: dict[str, int] = {}  # by value
    maker_of: dict[int, int] = {}  # by storage, the group whose call allocated it
    handed: dict[tuple[int | None, int | None, int | None], set[str]] = {}
    inputs: set[str] = set()

    def hand(names: Iterable[str], reader: int | None) -> None:
        for name in names:
            maker = group_of.get(name)
            if maker == reader or (maker is None and name not in leaf_of):
                continue
            handed.setdefault((maker, reader, leaf_of.get(name)), set()).add(name)

    for line in text.splitlines():
        bare = QUOTED.sub("", line)
        if bare.startswith("input "):
            inputs.add(bare.split(" ", 2)[1])
            leaf = LEAF.match(bare)
            if leaf is not None:
                leaf_of[leaf["name"]] = int(leaf["index"])
        elif bare.startswith("output "):
            hand(NAME.findall(bare), None)
        else:
            call = CALL.match(bare)
            if call is None:
                continue
            group = int(call["group"])
            results = NAME.findall(call["results"] or "")
            if not call["operator"].startswith(SIZE_OPERATORS):
                hand(NAME.findall(call["arguments"]), group)
            group_of.update(dict.fromkeys(results, group))
            for name in results:
                if name in extents:
                    maker_of.setdefault(extents[name].storage, group)
    input_storages = {extents[name].storage for name in inputs if name in extents}
    read = {name for (maker, _, _), names in handed.items() if maker is not None for name in names}
    made: dict[int, int] = {}
    for storage, size in by_storage(read, extents).items():
        if storage in maker_of and storage not in input_storages:
            made[maker_of[storage]] = made.get(maker_of[storage], 0) + size
    edges = tuple(
        PlannedEdge(maker, reader, sum(by_storage(names, extents).values()), leaf)
        for (maker, reader, leaf), names in handed.items()
    )
    return CallFlow(made, edges)


def by_storage(names: set[str], extents: Extents) -> dict[int, int]:
    """The bytes that `names` hold: of tensors that share memory, the largest counts."""
    sizes: dict[int, int] = {}
    for name in names & extents.keys():
        extent = extents[name]
        sizes[extent.storage] = max(extent.bytes, sizes.get(extent.storage, 0))
    return sizes
