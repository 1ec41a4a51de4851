# SPDX-License-Identifier: Apache-2.0
"""Express the results that a captured graph passes to the next graph in terms of the batch.

Where Python has to run in the middle of a forward, Dynamo captures several graphs, and the later
graphs take results of the earlier ones as inputs. A result that depends only on the batch can still
move: it has an expression. The receiving graph is extended by the expression and analysed like a
single graph that starts from the batch's tensors. The trainer still runs the captured graph: there,
the inputs are available, and no part of their expressions runs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from penstock.compat.modules import graph_module
from penstock.compat.operators import AUTOCAST_BEGIN, AUTOCAST_END
from penstock.graph.capture import AutocastState, GraphInput, tie_sizes
from penstock.graph.lowering import Lowering
from penstock.graph.recording import Name
from penstock.graph.sizes import Unlowerable
from penstock.graph.suffix import build_reference

# Longer expressions are not followed into the next graph: each graph would analyse all calls before
# it once more.
EXPRESSION_CALLS_MAX = 2000


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """The computation of one tensor from a batch. Two are the same if they are one object."""

    graph_module: fx.GraphModule  # takes the inputs in order, returns the tensor
    inputs: tuple[GraphInput, ...]  # leaves, constants and integers
    # Autocast's state at the capture of its calls; None for operators that autocast has processed.
    autocast: AutocastState | None


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a captured graph that has an expression."""

    position: int  # index among the graph's results
    expression: Expression
    taken: tuple[int, ...]  # the graph's inputs that are the expression's inputs


def expressions_of(lowering: Lowering, changing: set[int]) -> list[Result]:
    """Return the results of a graph that depend only on the batch.

    `changing` has the units that depend on more. A result has no expression if it shares memory
    with another result, or with a value that is not the batch's: a write through one of them would
    not be visible in the expression of the other.
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


def holds(value: torch.Tensor) -> bool:
    """Return whether an expression may replace the tensor: eager computed it without a history."""
    return not value.requires_grad and not value.is_inference()


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
    """Yield the expression of a value and the inputs that it takes, if it has one."""
    try:
        module = build_reference(lowering, changing, [name])
    except Unlowerable:
        return
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    taken = [index for index, node in enumerate(placeholders) if node.users]
    # An integer that is the size of an input needs that input, so that it can be derived.
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


@dataclass
class ExtendedGraph:
    """The extended graph, whose first inputs are the inputs of the captured one.

    `added` has the sources of the other inputs: an input of the captured graph, and a position
    among the inputs of that input's expression.
    """

    graph_module: fx.GraphModule
    inputs: list[GraphInput]
    added: list[tuple[int, int]] = field(default_factory=list)
    given: dict[fx.Node, int] = field(default_factory=dict)  # the input that a node computes
    in_front: set[fx.Node] = field(default_factory=set)  # calls of the expressions
    # The nodes whose values are not computed yet: they are treated like calls of the graph.
    waiting: set[fx.Node] = field(default_factory=set)


def extend(
    graph_module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    expressions: Mapping[int, Expression],
    waiting: Set[int] = frozenset(),
) -> ExtendedGraph:
    """Put `expressions`, which are keyed by input, in front of the graph.

    `inputs` has the kinds of the graph's inputs. The values of inputs in `waiting` are not
    available.
    """
    if not expressions:
        return ExtendedGraph(graph_module, tie_sizes(inputs))
    extended = _Extension(graph_module, inputs, waiting).extend(expressions)
    extended.inputs = tie_sizes(extended.inputs)
    return extended


class _Extension:
    def __init__(
        self, graph_module: fx.GraphModule, inputs: Sequence[GraphInput], waiting: Set[int]
    ) -> None:
        self._module = graph_module
        self._waiting = waiting
        self._graph = fx.Graph()
        self._attributes: dict[str, torch.Tensor] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._extended = ExtendedGraph(graph_module, list(inputs))
        self._placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        self._leaves: dict[int, int] = {}  # input index by leaf

    def extend(self, expressions: Mapping[int, Expression]) -> ExtendedGraph:
        extended = self._extended
        for index, node in enumerate(self._placeholders):
            self._copies[node] = self._graph.placeholder(node.name)
            if extended.inputs[index].kind == "leaf":
                self._leaves[extended.inputs[index].leaf_index] = index
        nodes = list(self._copies.values())
        places = {
            index: self._add_inputs(index, expression, nodes)
            for index, expression in expressions.items()
        }
        results: dict[int, fx.Node] = {}
        for index, expression in expressions.items():
            copies = self._inline(expression, [nodes[place] for place in places[index]])
            results[index] = copies.pop()
            if index not in self._waiting:
                self._extended.in_front.update(copies)
        for index, result in results.items():
            self._copies[self._placeholders[index]] = result
            if index in self._waiting:
                extended.waiting.add(result)
            else:
                extended.given[result] = index
            extended.inputs[index] = replace(extended.inputs[index], kind="made")
        self._tie_sizes(results)
        for node in self._module.graph.nodes:
            if node.op != "placeholder":
                self._copies[node] = self._copy(self._module, node, self._copies)
        extended.graph_module = graph_module(self._attributes, self._graph)
        return extended

    def _add_inputs(self, index: int, expression: Expression, nodes: list[fx.Node]) -> list[int]:
        """Make inputs of an expression inputs of the whole graph; return their indices."""
        places: list[int] = []
        for position, item in enumerate(expression.inputs):
            if item.kind == "leaf" and item.leaf_index in self._leaves:
                places.append(self._leaves[item.leaf_index])
                continue
            places.append(len(nodes))
            nodes.append(self._graph.placeholder(f"of_{index}_{position}"))
            self._extended.inputs.append(item)
            self._extended.added.append((index, position))
            if item.kind == "leaf":
                self._leaves[item.leaf_index] = places[-1]
        for position, item in enumerate(expression.inputs):
            if item.size_of is not None:
                base, dim = item.size_of
                self._extended.inputs[places[position]] = replace(item, size_of=(places[base], dim))
        return places

    def _inline(self, expression: Expression, arguments: Sequence[fx.Node]) -> list[fx.Node]:
        """Copy the calls of an expression; its result is repeated at the end."""
        begins = self._begin_outside_autocast() if expression.autocast is None else []
        calls: list[fx.Node] = list(begins)
        copies: dict[fx.Node, fx.Node] = {}
        remaining = iter(arguments)
        result: Any = None
        for node in expression.graph_module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(remaining)
            elif node.op == "output":
                result = copies[node.args[0]]
            else:
                copies[node] = self._copy(expression.graph_module, node, copies)
                calls.append(copies[node])
        assert isinstance(result, fx.Node)
        for begin in reversed(begins):
            calls.append(self._graph.call_function(AUTOCAST_END, (begin,)))
        return [*calls, result]

    def _begin_outside_autocast(self) -> list[fx.Node]:
        """Open a region for calls that autocast has already processed."""
        return [
            self._graph.call_function(AUTOCAST_BEGIN, (device, dtype, False, False))
            for device, dtype in AutocastState.now().enabled
        ]

    def _tie_sizes(self, results: Mapping[int, fx.Node]) -> None:
        """Derive integers that are a size of a value computed here from that value."""
        for index, node in enumerate(self._placeholders):
            item = self._extended.inputs[index]
            if item.size_of is not None and item.size_of[0] in results:
                base, dim = item.size_of
                size = self._graph.call_method("size", (results[base], dim))
                if base not in self._waiting:
                    self._extended.in_front.add(size)
                self._copies[node] = size
                self._extended.inputs[index] = replace(item, kind="made", size_of=None)

    def _copy(
        self, module: fx.GraphModule, node: fx.Node, copies: Mapping[fx.Node, fx.Node]
    ) -> fx.Node:
        copy = self._graph.node_copy(node, lambda argument: copies[argument])
        if node.op == "get_attr":
            name = f"attribute_{len(self._attributes)}"
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            self._attributes[name] = value
            copy.target = name
        return copy
