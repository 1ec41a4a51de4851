# SPDX-License-Identifier: Apache-2.0
"""A graph that Dynamo captured, and the kinds of its inputs.

A source name alone does not identify an input: a slice of a batch looks like the batch, and a
buffer can look like a local variable. So identity decides: with the batch's own tensors, and with
the model's buffers. Every other input that is no constant of a module or of the global scope is
state and stays with the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from penstock.graph.graph_inputs import GraphInput
from penstock.graph.sizes import Unlowerable
from penstock.seams.dynamo import Source, TensorPropertySource, is_from_local_source, source_of
from penstock.seams.modules import graph_module

LeafLookup = Callable[[torch.Tensor], int | None]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of a captured graph, without its value."""

    label: str
    place: Literal["module", "global", "local"]
    is_tensor: bool
    dynamic_dims: tuple[int, ...]
    size_of: tuple[int, int] | None
    is_parameter: bool = False  # which no tensor of a batch ever is


@dataclass(frozen=True)
class Captured:
    graph_module: fx.GraphModule
    placeholders: list[Placeholder]
    examples: list[Any]


class SeveralGraphs(Unlowerable):
    """Raised for a call that Dynamo cannot capture as one graph."""


class CaptureAborted(Exception):
    """Stops Dynamo once there is a graph: nothing of it is to run."""


def read_placeholders(graph_module: fx.GraphModule) -> list[Placeholder]:
    """Reads Dynamo's notes on each input; to be called while it compiles."""
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    index_by_source: dict[str, int] = {}
    for index, node in enumerate(nodes):
        index_by_source[_label(source_of(node))] = index
    return [_placeholder(node, index_by_source) for node in nodes]


def classify(
    placeholders: Sequence[Placeholder],
    arguments: Sequence[Any],
    leaf_index_of: LeafLookup,
    buffers: Mapping[int, torch.Tensor],
) -> list[GraphInput]:
    """The kind of each argument. `buffers` is by id."""
    inputs: list[GraphInput] = []
    for place, value in zip(placeholders, arguments, strict=True):
        if not isinstance(value, torch.Tensor):
            inputs.append(GraphInput("int", place.label, size_of=place.size_of))
            continue
        leaf_index = leaf_index_of(value)
        if leaf_index is not None and is_plain(value):
            kind = GraphInput("leaf", place.label, leaf_index, place.dynamic_dims)
        elif is_plain(value) and (place.place != "local" or id(value) in buffers):
            kind = GraphInput("const", place.label, dynamic_dims=place.dynamic_dims)
        else:
            kind = GraphInput("state", place.label, dynamic_dims=place.dynamic_dims)
        inputs.append(kind)
    return inputs


def is_plain(value: torch.Tensor) -> bool:
    """Whether a worker could hold what this tensor holds: strided, without a history."""
    return (
        type(value) in (torch.Tensor, torch.nn.Buffer)
        and not value.requires_grad
        and value.device.type != "meta"
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def capture_whole(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Captured:
    """Captures one call as one graph and runs nothing of it. Raises Unlowerable with the reason,
    SeveralGraphs if it is one of those."""
    captured: list[Captured] = []

    def backend(dynamos: fx.GraphModule, examples: Sequence[Any]) -> Any:
        # From torch 2.12 on Dynamo empties a graph whose compilation fails. A graph's deep copy has
        # new nodes with the same metadata and the same tensors.
        kept = graph_module(dynamos, copy.deepcopy(dynamos.graph))
        captured.append(Captured(kept, read_placeholders(dynamos), list(examples)))
        raise CaptureAborted

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        if not captured:
            raise SeveralGraphs(
                f"the model is not one whole graph: {first_sentence(error)}"
            ) from error
    if not captured:
        raise Unlowerable("there is nothing to move: no tensor operator was captured")
    # Dynamo keeps the backend, and so the list, for as long as the process lives.
    last = captured[-1]
    captured.clear()
    return last


def first_sentence(error: BaseException) -> str:
    """The one line of a Dynamo error that names its subject."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _label(source: Source | None) -> str:
    return str(source.name) if source is not None else "an input without a source"


def _placeholder(node: fx.Node, index_by_source: Mapping[str, int]) -> Placeholder:
    source = source_of(node)
    example = node.meta.get("example_value")
    dynamic_dims: tuple[int, ...] = ()
    if isinstance(example, torch.Tensor):
        dynamic_dims = tuple(
            dim for dim, size in enumerate(example.shape) if isinstance(size, torch.SymInt)
        )
    size_of = None
    if isinstance(source, TensorPropertySource) and source.prop.name == "SIZE":
        base = index_by_source.get(_label(source.base))
        if base is not None and source.idx is not None:
            size_of = (base, source.idx)
    place: Literal["module", "global", "local"] = "local"
    if source is not None and source.guard_source.is_unspecialized_nn_module():
        place = "module"
    elif source is not None and source.guard_source.is_specialized_nn_module():
        place = "module"
    elif source is not None and not is_from_local_source(source):
        place = "global"
    argument = node.meta.get("grapharg")
    return Placeholder(
        label=_label(source),
        place=place,
        is_tensor=isinstance(example, torch.Tensor),
        dynamic_dims=dynamic_dims,
        size_of=size_of,
        is_parameter=argument is not None and isinstance(argument.example, torch.nn.Parameter),
    )


def tie_sizes(inputs: Sequence[GraphInput]) -> list[GraphInput]:
    """Integers that are a symbolic size of a leaf follow it; all others are numbers of their
    own."""
    tied: list[GraphInput] = []
    for item in inputs:
        if item.size_of is not None:
            base, dim = item.size_of
            if inputs[base].kind != "leaf" or dim not in inputs[base].dynamic_dims:
                item = GraphInput("int", item.label)
        tied.append(item)
    return tied
