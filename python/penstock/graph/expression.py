# SPDX-License-Identifier: Apache-2.0
"""The results that a captured graph hands on to the next one, as expressions of the batch.

Where Python has to run in the middle of a forward, Dynamo captures several graphs, and the later
ones are given results of the earlier ones. A result that follows from the batch alone can still
move: it has an expression, and the graph that receives it is analysed with the expression in front
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from penstock.graph.autocast import AutocastState
from penstock.graph.graph_inputs import GraphInput
from penstock.graph.lowering import Lowering
from penstock.graph.recording import Name
from penstock.graph.sizes import Unlowerable
from penstock.graph.suffix import build_reference

# An expression of more calls is not followed into the next graph: each graph would analyse all of
# those before it once more.
EXPRESSION_CALLS_MAX = 2000


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """How one tensor follows from a batch. Two are the same if they are one object."""

    graph_module: fx.GraphModule  # takes the inputs in order, gives the tensor
    inputs: tuple[GraphInput, ...]  # leaves, constants and integers
    # When its calls were captured; None if they are operators as they come out of autocast.
    autocast: AutocastState | None


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a captured graph that has an expression."""

    position: int  # among the graph's results
    expression: Expression
    taken: tuple[int, ...]  # which of the graph's inputs are those of the expression


def expressions_of(lowering: Lowering, changing: set[int]) -> list[Result]:
    """The results of a graph that follow from the batch; `changing` are the units that do not.

    A result has none if it shares memory with another result, or with a value that is not the
    batch's: a write through the one would not be seen in the expression of the other.
    """
    output = next(iter(reversed(lowering.graph_module.graph.nodes)))
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return []
    names = [
        (position, name)
        for position, node in enumerate(results)
        if isinstance(node, fx.Node)
        and isinstance(name := lowering.reads[output].get(node), Name)
        and name not in lowering.input_names
        and name not in lowering.given
    ]
    return [
        Result(position, expression, taken)
        for position, name in _unshared(lowering, names)
        for expression, taken in _expression(lowering, changing, name)
    ]


def _unshared(lowering: Lowering, names: list[tuple[int, Name]]) -> Iterator[tuple[int, Name]]:
    recording = lowering.recording
    batch: set[int] = set()
    others = set(recording.mutated_storages)
    for name, index in lowering.input_names.items():
        is_leaf = lowering.inputs[index].kind == "leaf"
        (batch if is_leaf else others).add(recording.forms[name].storage)
    others.update(recording.forms[name].storage for name in lowering.given)
    others.update(recording.forms[name].storage for name in lowering.attributes)
    uses = Counter(recording.forms[name].storage for name in {name for _, name in names})
    for position, name in names:
        storage = recording.forms[name].storage
        if storage not in others and (storage in batch or uses[storage] == 1):
            yield position, name


def _expression(
    lowering: Lowering, changing: set[int], name: Name
) -> Iterator[tuple[Expression, tuple[int, ...]]]:
    """The expression of a value and the inputs it takes, or nothing."""
    try:
        module = build_reference(lowering, changing, [name])
    except Unlowerable:
        return
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    taken = [index for index, node in enumerate(placeholders) if node.users]
    # An integer that is the size of an input needs that input, so that it can be followed.
    sized = {lowering.inputs[index].size_of for index in taken} - {None}
    taken = sorted({*taken, *(base for base, _ in filter(None, sized))})
    if any(lowering.inputs[index].kind in ("state", "made") for index in taken):
        return
    for index, node in enumerate(placeholders):
        if index not in taken:
            graph.erase_node(node)
    if len(graph.nodes) > EXPRESSION_CALLS_MAX:
        return
    output = next(iter(reversed(graph.nodes)))
    output.args = (output.args[0][0],)
    module.recompile()
    place = {index: place for place, index in enumerate(taken)}
    inputs = tuple(_placed(lowering.inputs[index], place) for index in taken)
    yield Expression(module, inputs, lowering.autocast), tuple(taken)


def _placed(item: GraphInput, place: dict[int, int]) -> GraphInput:
    if item.size_of is None:
        return item
    base, dim = item.size_of
    return GraphInput(item.kind, item.label, size_of=(place[base], dim))


def holds(value: torch.Tensor) -> bool:
    """Whether a tensor may stand for its expression: eager made it without a history."""
    return not value.requires_grad and not value.is_inference()
