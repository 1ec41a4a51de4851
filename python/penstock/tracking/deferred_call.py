# SPDX-License-Identifier: Apache-2.0
"""How the result of an operator that waits follows from its batch."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from penstock.graph.capture import GraphInput
from penstock.graph.expression import Expression
from penstock.seams.modules import graph_module
from penstock.tracking.lazy_value import LazyValue
from penstock.tracking.operands import Form, call_of

# The most calls in one expression. A program that does more to a batch computes the rest at once.
CALLS_MAX = 64
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


@dataclass(frozen=True)
class Recipe:
    """The results of an operator on lazy arguments."""

    metas: list[torch.Tensor]
    expressions: list[Expression]
    taken: list[tuple[int, int]]  # each input: of which argument, and which of its own inputs
    is_list: bool
    device: torch.device  # that of the results


def make_recipe(
    func: Any,
    values: Sequence[Any],
    form: Form,
    metas: list[torch.Tensor],
    device: torch.device,
    *,
    is_list: bool,
) -> Recipe | None:
    """The recipe of `func`, called with `values` in this form, whose results look like
    `metas` and are on `device`. None for an expression that has become too long."""
    return _Assembly(func, values, form).recipe(metas, device, is_list)


class _Assembly:
    """Puts the expressions of an operator's arguments and the operator itself into one."""

    def __init__(self, func: Any, values: Sequence[Any], form: Form) -> None:
        self._func = func
        self._values = values
        self._form = form
        self._graph = fx.Graph()
        self._taken: list[tuple[int, int]] = []
        self._inputs: list[GraphInput] = []
        self._places: dict[int, fx.Node] = {}  # by the object that is the input
        self._copies: dict[Any, fx.Node] = {}  # by expression

    def recipe(
        self, metas: list[torch.Tensor], device: torch.device, is_list: bool
    ) -> Recipe | None:
        for argument, value in enumerate(self._values):
            if isinstance(value, LazyValue) and not isinstance(value.source, int):
                for place, item in enumerate(value.source.inputs):
                    self._add(argument, place, value.inputs[place], item)
            elif isinstance(value, (LazyValue, torch.Tensor)):
                self._add(argument, -1, value, None)
        arguments = [self._read(value) for value in self._values]
        args, kwargs = call_of(arguments, self._form)
        call = self._graph.call_function(self._func, args, kwargs)
        call.meta["stack_trace"] = _users_line()
        if len(self._graph.nodes) - len(self._inputs) > CALLS_MAX:
            return None
        expressions: list[Expression] = []
        for place in range(len(metas)):
            graph = fx.Graph()
            copies: dict[fx.Node, fx.Node] = {}
            result = graph.graph_copy(self._graph, copies)
            assert result is None
            node = copies[call]
            if is_list:
                node = graph.call_function(operator.getitem, (node, place))
            graph.output(node)
            module = graph_module(torch.nn.Module(), graph)
            expressions.append(Expression(module, tuple(self._inputs), None))
        return Recipe(metas, expressions, self._taken, is_list, device)

    def _add(self, argument: int, place: int, value: Any, item: GraphInput | None) -> None:
        """Notes one input, once."""
        if id(value) in self._places:
            return
        index = len(self._inputs)
        if item is None:
            if isinstance(value, LazyValue):
                dims = tuple(range(value.meta.dim()))
                assert isinstance(value.source, int)
                item = GraphInput("leaf", f"batch tensor {value.source}", value.source, dims)
            else:
                item = GraphInput("const", f"a constant of the program ({id(value)})")
        self._places[id(value)] = self._graph.placeholder(f"input_{index}")
        self._inputs.append(item)
        self._taken.append((argument, place))

    def _read(self, value: Any) -> Any:
        if isinstance(value, LazyValue) and not isinstance(value.source, int):
            return self._inline(value.source, value.inputs)
        if isinstance(value, (LazyValue, torch.Tensor)):
            return self._places[id(value)]
        return value

    def _inline(self, expression: Expression, inputs: Sequence[Any]) -> fx.Node:
        if expression in self._copies:
            return self._copies[expression]
        copies: dict[fx.Node, fx.Node] = {}
        remaining = iter(inputs)
        for node in expression.graph_module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = self._places[id(next(remaining))]
            elif node.op == "output":
                self._copies[expression] = copies[node.args[0]]
            else:
                copies[node] = self._graph.node_copy(node, lambda argument: copies[argument])
        return self._copies[expression]


def _users_line() -> str | None:
    """Where the program called the operator, as Dynamo would put it."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
    return None
