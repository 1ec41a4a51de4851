# SPDX-License-Identifier: Apache-2.0
"""A record of each call of a captured graph: its inputs, its results, and whether it must stay."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from penstock.graph.call_labels import call_label
from penstock.graph.recording import Name, Recorder
from penstock.graph.sizes import Unlowerable, has_unknown
from penstock.seams.fake_tensors import FakeTensorMode
from penstock.seams.operators import AUTOCAST_BEGIN, AUTOCAST_END, enable_python_dispatcher
from penstock.seams.trees import tree_flatten_with_path, tree_leaves

# The types that a call may return beside tensors. A torch.Size holds integers, perhaps symbolic
# ones.
PLAIN_RESULTS = (
    int,
    float,
    bool,
    str,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    type(None),
)

IS_NO_OPERATOR = "it is no operator: it has an effect, and nothing to compute"


@dataclass(frozen=True)
class Home:
    """The call that made a value, and where in its result the value sits."""

    node: fx.Node
    path: tuple[Any, ...]
    since: fx.Node  # the call after which it sits there: a later one, when that wrote to the object


class CallNotes(fx.Interpreter):
    """Runs the captured graph on fake tensors, one call at a time, and records each call."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        recorder: Recorder,
        mode: FakeTensorMode,
        given: Mapping[fx.Node, int],
        waiting: Set[fx.Node],
    ) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.nodes = [
            node
            for node in graph_module.graph.nodes
            if node.op in ("call_function", "call_method", "get_attr")
        ]
        self.values: dict[fx.Node, Any] = {}
        self.reads: dict[fx.Node, dict[fx.Node, Any]] = {}
        self.homes: dict[Name, Home] = {}
        self._home_of_object: dict[int, Home] = {}
        self.droppable: set[fx.Node] = set()
        self.output_names: list[Name] = []
        self.attributes: dict[Name, torch.Tensor] = {}
        self.given: dict[Name, int] = {}
        self.regions: dict[fx.Node, fx.Node] = {}
        self.waiting: set[Name] = set()
        self._given = given
        self._waiting = waiting
        self._staying: set[Name] = set()
        self._recorder = recorder
        self._mode = mode
        self._index_of = {node: index for index, node in enumerate(self.nodes)}
        self._present: fx.Node | None = None

    def present_call(self) -> str:
        return call_label(self._present) if self._present is not None else "the graph"

    def run_node(self, n: fx.Node) -> Any:
        self._present = n
        read = {a: self._recorder.names_in(self.env[a]) for a in n.all_input_nodes}
        self.reads[n] = read
        if n.op == "placeholder":
            value = super().run_node(n)
            self.values[n] = value
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._staying.add(self._recorder.name_of(value))
            return value
        if n.op == "output":
            self.output_names = _names_of(list(read.values()))
            return super().run_node(n)
        self._recorder.begin_call(self._index_of[n])
        if n.target in (AUTOCAST_BEGIN, AUTOCAST_END):
            if n.target is AUTOCAST_END:
                self.regions[n.args[0]] = n  # type: ignore[index]
            self.droppable.add(n)
            return super().run_node(n)
        op_count = len(self._recorder.recording.ops)
        if not self._staying.isdisjoint(_names_of(list(read.values()))):
            # It depends on a parameter, so it stays whatever it is made of. Dynamo's own
            # decompositions keep sizes symbolic where those of eager assume them.
            with enable_python_dispatcher():
                value = super().run_node(n)
            self._staying.update(_names_of(self._recorder.names_in(value)))
        else:
            value = super().run_node(n)
        if n.op == "get_attr":
            value = self._fake_attribute(n, value)
        self.values[n] = value
        self._settle(n, value, op_count)
        if n in self._given:
            self._recorder.note_input_memory(value)
            self.given[self._recorder.name_of(value)] = self._given[n]
        if n in self._waiting:
            self.waiting.add(self._recorder.name_of(value))
        return value

    def _fake_attribute(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise Unlowerable(f"the graph holds {node.target}, which is not a tensor")
        fake = self._mode.from_tensor(value, static_shapes=True)
        name = Name(f"%a{len(self.attributes)}")
        self._recorder.name_input(fake, name)
        self.attributes[name] = value
        return fake

    def _settle(self, node: fx.Node, value: Any, op_count: int) -> None:
        recording = self._recorder.recording
        for path, leaf in tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                name = self._recorder.name_of(leaf)
                home = Home(node, tuple(_key(step) for step in path), node)
                self.homes.setdefault(name, home)
                self._home_of_object.setdefault(id(leaf), home)
            elif not isinstance(leaf, PLAIN_RESULTS):
                raise Unlowerable(f"{call_label(node)} returns a {type(leaf).__name__}")
        for argument in node.all_input_nodes:
            for leaf in tree_leaves(self.env[argument]):
                known = self._home_of_object.get(id(leaf))
                if known is not None and self._recorder.name_of(leaf) not in self.homes:
                    # A write that gives no result (`y[mask] = 0`).
                    name = self._recorder.name_of(leaf)
                    self.homes[name] = Home(known.node, known.path, node)
        ops = recording.ops[op_count:]
        read = _names_of(list(self.reads[node].values()))
        if not ops and node.op != "get_attr":
            made = [leaf for leaf in tree_leaves(value) if leaf is not None]
            # `y.detach_()` never gets below autograd, which it changes.
            is_write = node.op == "call_method" and str(node.target).endswith("_")
            if (
                made
                and not any(_is_unknown(leaf) for leaf in made)
                and not (is_write and not self._staying.isdisjoint(read))
            ):
                # It hands on a value that exists already, or an integer: nothing to run anywhere.
                self.droppable.add(node)
            else:
                self._recorder.pin_call(read, IS_NO_OPERATOR)
            return
        if node.op == "get_attr":
            self.droppable.add(node)
            return
        used = {arg for op in ops for arg in _names_of([op.args, list(op.kwargs.values())])}
        unused = [name for name in read if name not in used]
        self._recorder.note_reads(unused)


def _is_unknown(value: Any) -> bool:
    """Whether a number follows from the values of a tensor, which nobody knows here."""
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return True
    return isinstance(value, torch.SymInt) and has_unknown(value.node.expr)


def _names_of(value: Any) -> list[Name]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Name)]


def _key(step: Any) -> Any:
    for attribute in ("idx", "key", "name"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    raise Unlowerable(f"a result is nested in a way that has no index: {step}")
