# SPDX-License-Identifier: Apache-2.0
"""Reassemble a captured graph around a cut.

The suffix consists of the very calls that Dynamo saw, in their order, so that autograd, hooks and
the random generators see the same as before. Only the calls that moved are missing, and their
results are additional arguments. The reference of a prefix has the calls that moved: it runs them
eagerly in the trainer, as the oracle for boundary tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from penstock import _C
from penstock.compat.modules import graph_module
from penstock.compat.operators import tree_leaves, tree_map
from penstock.graph.lowering import Lowering
from penstock.graph.recording import Name
from penstock.graph.sizes import Unlowerable, expression_of, fold


class CannotMove(Unlowerable):
    """Raised for a moved or copied call that can only run in its original position.

    There, the call needs `values`. Another plan may do.
    """

    def __init__(self, reason: str, call_index: int, values: Sequence[Name]) -> None:
        super().__init__(reason)
        self.call_index = call_index
        self.values = list(values)


def build_suffix(
    lowering: Lowering, kept: set[int], moved: set[int], boundary: Sequence[Name]
) -> fx.GraphModule:
    """Return the graph without the units in `moved`.

    It takes the original inputs, then the boundary tensors. Units in neither set are computed
    wherever they are needed.
    """
    assembly = _Assembly(lowering, moved, moved, boundary, lowering.given)
    for node in lowering.nodes:
        if (
            lowering.unit_of[assembly.index_of[node]] in kept
            and node not in lowering.droppable
            and node not in lowering.in_front
        ):
            assembly.need(node)
    output = next(iter(reversed(lowering.graph_module.graph.nodes)))
    assembly.need_reads(output)
    assembly.emit()
    result = fx.node.map_arg(output.args[0], lambda a: assembly.read(output, a))
    return assembly.finish(result)


def build_reference(lowering: Lowering, kept: set[int], values: Sequence[Name]) -> fx.GraphModule:
    """Return a graph that computes `values` from the original inputs, as eager would.

    It has no call of the units that are `kept`.
    """
    assembly = _Assembly(lowering, set(), kept, [], {})
    for name in values:
        assembly.need_name(name)
    assembly.emit(snapshots={name for name in values if name in lowering.recording.superseded})
    return assembly.finish(tuple(assembly.value(name) for name in values))


class _Assembly:
    """Collects the calls that are needed, then writes them in their original order."""

    def __init__(
        self,
        lowering: Lowering,
        moved: set[int],
        forbidden: set[int],
        boundary: Sequence[Name],
        given: Mapping[Name, int],
    ) -> None:
        self.index_of = {node: index for index, node in enumerate(lowering.nodes)}
        self._lowering = lowering
        self._moved = moved  # their results are read as boundary tensors
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._snapshots: dict[Name, fx.Node] = {}
        self._sizes: dict[sympy.Symbol, fx.Node] = {}
        for node in lowering.graph_module.graph.nodes:
            if node.op == "placeholder":
                self._copies[node] = self._graph.placeholder(node.name)
        self._placeholders = list(self._copies.values())
        self._at_hand = {**lowering.input_names, **given}
        self._in_front = lowering.in_front if given else set()
        self._boundary = {
            name: self._graph.placeholder(f"boundary_{index}")
            for index, name in enumerate(boundary)
        }
        self._calls = self._calls_of(forbidden)

    def need(self, node: fx.Node) -> None:
        """Mark a call, its operands' calls, and the calls that write to the same memory."""
        place = self.index_of.get(node)
        fault = None if place is None else self._calls.need(place)
        if fault is None:
            return
        reads_intermediate, call, reader = fault
        culprit = self._lowering.nodes[call]
        if reads_intermediate:
            self._homes_read_by(culprit)  # raises the error that names the value
        raise self._needed_twice(culprit, None if reader is None else self._lowering.nodes[reader])

    def _calls_of(self, forbidden: set[int]) -> _C.NeededCalls:
        """Return all calls, none of them needed so far. Calls of `forbidden` units must not run."""
        lowering = self._lowering
        calls = []
        for node, unit in zip(lowering.nodes, lowering.unit_of, strict=True):
            homes: list[fx.Node] = []
            try:
                homes = self._homes_read_by(node)
                reads_intermediate = False
            except Unlowerable:
                reads_intermediate = True
            places = [self.index_of[home] for home in homes if home in self.index_of]
            is_droppable = node in lowering.droppable
            calls.append(_C.CapturedCall(unit, is_droppable, reads_intermediate, places))
        return _C.NeededCalls(calls, forbidden)

    def _needed_twice(self, node: fx.Node, reader: fx.Node | None) -> Unlowerable:
        reason = f"{node.name} would be needed on both sides of the cut"
        if reader is None:
            return Unlowerable(reason)
        read = tree_leaves(list(self._lowering.reads[reader].values()))
        names = [value for value in read if isinstance(value, Name)]
        return CannotMove(reason, self.index_of[reader], names)

    def need_reads(self, node: fx.Node) -> None:
        for home in self._homes_read_by(node):
            self.need(home)

    def need_name(self, name: Name) -> None:
        home = self._home(name)
        if home is not None:
            self.need(home)

    def _homes_read_by(self, node: fx.Node) -> list[fx.Node]:
        homes: list[fx.Node] = []
        for argument, names in self._lowering.reads[node].items():
            if self._is_copied(argument):
                homes.append(argument)
                continue
            for name in tree_leaves(names):
                home = self._home(name) if isinstance(name, Name) else None
                if home is not None:
                    homes.append(home)
        return homes

    def _is_copied(self, node: fx.Node) -> bool:
        """Return whether readers of `node` read a copy of the call, rather than values by name."""
        if node.op == "placeholder" or node in self._lowering.droppable:
            return node.op == "get_attr"
        if node in self._in_front:
            return False
        return self._lowering.unit_of[self.index_of[node]] not in self._moved

    def _home(self, name: Name) -> fx.Node | None:
        """Return the call to run for `name`; None if the value is available anyway."""
        if name in self._boundary or name in self._at_hand:
            return None
        home = self._lowering.homes.get(name)
        if home is None:
            raise Unlowerable(f"the value {name} is an intermediate of one call")
        return home.node

    def emit(self, snapshots: set[Name] | None = None) -> None:
        for begin, end in self._lowering.regions.items():
            self._calls.need_region(self.index_of[begin], self.index_of[end])
        for place in sorted(self._calls.calls):
            node = self._lowering.nodes[place]
            read = functools.partial(self.read, node)
            copy = self._graph.create_node(
                node.op,
                node.target,
                fx.node.map_arg(node.args, read),
                fx.node.map_arg(node.kwargs, read),
                node.name,
            )
            copy.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
            self._copies[node] = copy
            for name in snapshots or ():
                if self._lowering.homes[name].since is node:
                    # A later call writes to this object; its value at this point is needed.
                    self._snapshots[name] = self._graph.call_method("clone", (self.value(name),))

    def read(self, reader: fx.Node, argument: fx.Node) -> Any:
        """Return the value that replaces `argument` where `reader` reads it."""
        if argument in self._copies:
            return self._copies[argument]
        return tree_map(self._stand_in, self._lowering.reads[reader][argument])

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, Name):
            return self.value(value)
        if isinstance(value, torch.SymInt):
            return self._size(expression_of(value, self._lowering.shape_env))
        if isinstance(value, torch.Size):
            return tuple(self._stand_in(size) for size in value)
        return value

    def value(self, name: Name) -> fx.Node:
        """Return the node that holds a value by name."""
        if name in self._snapshots:
            return self._snapshots[name]
        if name in self._boundary:
            return self._boundary[name]
        if name in self._at_hand:
            return self._placeholders[self._at_hand[name]]
        home = self._lowering.homes[name]
        node = self._copies[home.node]
        for step in home.path:
            node = self._graph.call_function(operator.getitem, (node, step))
        return node

    def _size(self, expression: int | sympy.Basic) -> Any:
        if isinstance(expression, int):
            return expression
        binary: dict[str, Callable[..., Any]] = {
            "add": operator.add,
            "mul": operator.mul,
            "floordiv": operator.floordiv,
            "mod": operator.mod,
            "max": max,
            "min": min,
        }

        def combine(name: str, a: Any, b: Any) -> Any:
            return self._graph.call_function(binary[name], (a, b))

        return fold(expression, self._symbol, int, combine)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self._sizes:
            bindings = [b for b in self._lowering.conditions.bindings if b.symbol == symbol]
            if not bindings:
                raise Unlowerable(f"the size {symbol} depends on the values of a tensor")
            binding = bindings[0]
            self._sizes[symbol] = self._graph.call_method(
                "size", (self._placeholders[binding.input_index], binding.dim)
            )
        return self._sizes[symbol]

    def finish(self, result: Any) -> fx.GraphModule:
        self._graph.output(result)
        self._graph.lint()
        return graph_module(self._lowering.graph_module, self._graph)
