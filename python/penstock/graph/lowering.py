# SPDX-License-Identifier: Apache-2.0
"""Lower a captured graph, call by call and operator by operator.

A `Lowering` has the captured graph call by call (as Dynamo saw it and the trainer runs it) and
operator by operator (as a worker can run it), and relates the two: the call that made each value
(`homes`), the values that every call reads (`reads`), and the calls that move together (`unit_of`).
`CallNotes` records the calls, and `recording.py` their operators.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.compat.fake_tensors import LOGGER, FakeTensorMode
from penstock.compat.operators import (
    AUTOCAST_BEGIN,
    AUTOCAST_END,
    enable_python_dispatcher,
    tree_flatten_with_path,
    tree_leaves,
)
from penstock.graph.capture import (
    AutocastState,
    GraphInput,
    autocast_restored,
    call_label,
    fake_inputs,
    refuse_by_construction,
)
from penstock.graph.recording import CompositeOperators, Name, Recorder, Recording
from penstock.graph.sizes import SizeConditions, Unlowerable, has_unknown

# The types that a call may return in addition to tensors. A torch.Size holds integers, perhaps
# symbolic ones.
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

NOT_AN_OPERATOR = "it is not an operator: it has a side effect and computes no value"


@dataclass
class Lowering:
    """A lowered captured graph. It does not depend on the values of any tensor."""

    graph_module: fx.GraphModule
    inputs: list[GraphInput]
    recording: Recording
    conditions: SizeConditions
    shape_env: ShapeEnv | None
    nodes: list[fx.Node]
    reads: dict[fx.Node, dict[fx.Node, Any]]  # by call and argument, with names for tensors
    homes: dict[Name, Home]
    input_names: dict[Name, int]
    droppable: set[fx.Node]
    unit_of: list[int]
    output_names: list[Name]
    attributes: dict[Name, torch.Tensor]  # tensors in the graph module itself
    given: dict[Name, int]  # computed before the captured calls; the input that has the value
    waiting: set[Name]  # inputs of the captured calls that are not computed yet
    in_front: set[fx.Node]  # calls before the captured ones
    regions: dict[fx.Node, fx.Node]  # under autocast: the end of each, by its start
    autocast: AutocastState


def lower(
    graph_module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    examples: Sequence[Any],
    *,
    symbolic: bool = True,
    given: Mapping[fx.Node, int] | None = None,
    in_front: Set[fx.Node] = frozenset(),
    waiting: Set[fx.Node] = frozenset(),
) -> Lowering:
    """Lower `graph_module` for inputs like `examples`.

    With `symbolic`, dimensions of leaves that Dynamo treats as dynamic stay symbols; without, every
    size is the example's, and the conditions record this. `given`, `in_front` and `waiting` are the
    fields of an ExtendedGraph.

    Raises:
        Unlowerable: the graph cannot be lowered; the message is the reason.
    """
    refuse_by_construction(graph_module)
    shape_env = ShapeEnv(specialize_zero_one=True) if symbolic else None
    mode = FakeTensorMode(shape_env=shape_env)
    mode.cache_enabled = False  # torch's cache of results keeps the symbols of each plan
    mode.allow_scalar_outputs = symbolic  # a number read from a tensor is unknown
    arguments, conditions = fake_inputs(mode, inputs, examples, symbolic)
    recorder = Recorder(shape_env)
    input_names: dict[Name, int] = {}
    for index, (item, value) in enumerate(zip(inputs, arguments, strict=True)):
        if isinstance(value, torch.Tensor):
            prefix = {"leaf": "x", "const": "c", "state": "p", "int": "s"}[item.kind]
            name = Name(f"%{prefix}{index}")
            recorder.name_input(value, name)
            input_names[name] = index
    notes = CallNotes(graph_module, recorder, mode, given or {}, waiting)
    with (
        _quiet(),
        autocast_restored(),
        torch.inference_mode(False),
        mode,
        recorder,
        CompositeOperators(recorder),
    ):
        try:
            notes.run(*arguments)
        except Unlowerable:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise Unlowerable(
                f"{notes.present_call()} cannot be recorded: "
                f"{type(error).__name__}: {reason[0] if reason else ''}"
            ) from error
    if shape_env is not None:
        conditions.guards = [guard.expr for guard in shape_env.guards]
    return Lowering(
        graph_module=graph_module,
        inputs=list(inputs),
        recording=recorder.recording,
        conditions=conditions,
        shape_env=shape_env,
        nodes=notes.nodes,
        reads=notes.reads,
        homes=notes.homes,
        input_names=input_names,
        droppable=notes.droppable,
        unit_of=_join(len(notes.nodes), recorder.recording.fused_calls),
        output_names=notes.output_names,
        attributes=notes.attributes,
        given=notes.given,
        waiting=notes.waiting,
        in_front=set(in_front),
        regions=notes.regions,
        autocast=AutocastState.now(),
    )


def leaves_of(lowering: Lowering, inputs: Sequence[Any], leaf_count: int) -> list[torch.Tensor]:
    """Return all tensors of the batch by number, on the CPU, as workers hold them.

    Tensors that the model was not given are empty.
    """
    leaves = [torch.empty(0) for _ in range(leaf_count)]
    for item, value in zip(lowering.inputs, inputs, strict=True):
        if item.kind == "leaf":
            leaves[item.leaf_index] = value.cpu()
    return leaves


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's message about an operator without symbolic sizes out of the user's log.

    Lowering is tried again without symbolic sizes.
    """
    logger = logging.getLogger(LOGGER)

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def _join(call_count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Number the calls so that joined calls share a number, the smallest of their indices."""
    unit_of = list(range(call_count))

    def root(index: int) -> int:
        while unit_of[index] != index:
            index = unit_of[index]
        return index

    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        unit_of[high] = low
    return [root(index) for index in range(call_count)]


@dataclass(frozen=True)
class Home:
    """The call that made a value, and the value's position in the call's result."""

    node: fx.Node
    path: tuple[Any, ...]
    since: fx.Node  # the call after which it is there: a later one, if that wrote to the object


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
            # It depends on a parameter, so it stays in any case. Dynamo's decompositions keep sizes
            # symbolic where eager's decompositions fix them.
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
            raise Unlowerable(f"the graph contains {node.target}, which is not a tensor")
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
                    # A write without a result (`y[mask] = 0`).
                    name = self._recorder.name_of(leaf)
                    self.homes[name] = Home(known.node, known.path, node)
        ops = recording.ops[op_count:]
        read = _names_of(list(self.reads[node].values()))
        if not ops and node.op != "get_attr":
            made = [leaf for leaf in tree_leaves(value) if leaf is not None]
            # `y.detach_()` changes autograd and does not reach the level below it.
            is_write = node.op == "call_method" and str(node.target).endswith("_")
            if (
                made
                and not any(_is_unknown(leaf) for leaf in made)
                and not (is_write and not self._staying.isdisjoint(read))
            ):
                # It returns an existing value or an integer: there is no operator to run.
                self.droppable.add(node)
            else:
                self._recorder.pin_call(read, NOT_AN_OPERATOR)
            return
        if node.op == "get_attr":
            self.droppable.add(node)
            return
        used = {arg for op in ops for arg in _names_of([op.args, list(op.kwargs.values())])}
        unused = [name for name in read if name not in used]
        self._recorder.note_reads(unused)


def _is_unknown(value: Any) -> bool:
    """Return whether a number depends on the values of a tensor, which are unknown here."""
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return True
    return isinstance(value, torch.SymInt) and has_unknown(value.node.expr)


def _names_of(value: Any) -> list[Name]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Name)]


def _key(step: Any) -> Any:
    for attribute in ("idx", "key", "name"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    raise Unlowerable(f"a result is nested in an unsupported way: {step}")
