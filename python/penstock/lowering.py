# SPDX-License-Identifier: Apache-2.0
"""From a captured graph to the text of the intermediate representation.

A `Lowering` knows the captured graph call by call (what Dynamo saw, which is what the trainer runs)
and operator by operator (what a worker can run), and how the two hang together: which call made
which value (`homes`), what every call reads (`reads`), and which calls move together (`unit_of`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from penstock.call_labels import call_label
from penstock.construction import refuse_by_construction
from penstock.recording import Name, Recorder, Recording, WholeOperators, storage_key
from penstock.sizes import SizeBinding, SizeConditions, Unlowerable, has_unknown
from penstock.surroundings import REGION_BEGIN, REGION_END, AutocastState, autocast_put_back

# A "made" one is computed in the graph itself, by an expression in front of what was captured.
InputKind = Literal["leaf", "const", "state", "int", "made"]


# What a call may return beside tensors. A torch.Size holds integers, perhaps symbolic ones.
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

SHARES_MEMORY = "its result leaves forward and shares memory with an input or with another result"
IS_NO_OPERATOR = "it is no operator: it has an effect, and nothing to compute"


@dataclass(frozen=True)
class GraphInput:
    """What one placeholder of the captured graph stands for."""

    kind: InputKind
    label: str  # how Dynamo names the source: L['self']._buffers['mean']
    leaf_index: int = -1
    dynamic_dims: tuple[int, ...] = ()
    size_of: tuple[int, int] | None = None  # an int that is this dimension of that input


@dataclass(frozen=True)
class Home:
    """The call that made a value, and where in its result the value sits."""

    node: fx.Node
    path: tuple[Any, ...]
    since: fx.Node  # the call after which it sits there: a later one, when that wrote to the object


@dataclass
class Lowering:
    """A captured graph, written down. Nothing in it depends on the values of any tensor."""

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
    attributes: dict[Name, torch.Tensor]  # tensors that the graph module itself holds
    given: dict[Name, int]  # computed in front of the captured calls, and at hand as that input
    waiting: set[Name]  # inputs of the captured calls that nobody has computed yet
    in_front: set[fx.Node]  # the calls that are
    regions: dict[fx.Node, fx.Node]  # under autocast: where each ends, by where it begins
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
    """Writes `graph_module` down for inputs like `examples`. Raises Unlowerable with the reason.

    With `symbolic`, dimensions of leaves that Dynamo treats as dynamic stay symbols; without, every
    size is the example's, and the conditions say so. `given`, `in_front` and `waiting` are those of
    an ExtendedGraph.
    """
    refuse_by_construction(graph_module)
    shape_env = ShapeEnv(specialize_zero_one=True) if symbolic else None
    mode = FakeTensorMode(shape_env=shape_env)
    mode.allow_scalar_outputs = symbolic  # a number read from a tensor is one that nobody knows
    arguments, conditions = _fake_arguments(mode, inputs, examples, symbolic)
    recorder = Recorder(shape_env)
    input_names: dict[Name, int] = {}
    for index, (item, value) in enumerate(zip(inputs, arguments, strict=True)):
        if isinstance(value, torch.Tensor):
            prefix = {"leaf": "x", "const": "c", "state": "p", "int": "s"}[item.kind]
            name = Name(f"%{prefix}{index}")
            recorder.name_input(value, name)
            input_names[name] = index
    interpreter = _Interpreter(graph_module, recorder, mode, given or {}, waiting)
    with (
        _quiet(),
        autocast_put_back(),
        torch.inference_mode(False),
        mode,
        recorder,
        WholeOperators(recorder),
    ):
        try:
            interpreter.run(*arguments)
        except Unlowerable:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise Unlowerable(
                f"{interpreter.present_call()} cannot be written down: "
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
        nodes=interpreter.nodes,
        reads=interpreter.reads,
        homes=interpreter.homes,
        input_names=input_names,
        droppable=interpreter.droppable,
        unit_of=_join(len(interpreter.nodes), recorder.recording.fused_calls),
        output_names=interpreter.output_names,
        attributes=interpreter.attributes,
        given=interpreter.given,
        waiting=interpreter.waiting,
        in_front=set(in_front),
        regions=interpreter.regions,
        autocast=AutocastState.now(),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps from the user's log what torch says of an operator that takes no symbolic sizes: it is
    tried again without."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


class _Interpreter(fx.Interpreter):
    """Runs the captured graph on fake tensors, one call at a time, and keeps what each one did."""

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
            self._pin_escaping_aliases(n)
            return super().run_node(n)
        self._recorder.begin_call(self._index_of[n])
        if n.target in (REGION_BEGIN, REGION_END):
            if n.target is REGION_END:
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
                # It hands on what exists already, or an integer: nothing to run anywhere.
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

    def _pin_escaping_aliases(self, output: fx.Node) -> None:
        """Where what leaves the model shares memory with an input or another result, every view of
        that memory stays: the user may write to one and look at the other.

        The views in between stay too. Shipped, they would be copies.
        """
        forms = self._recorder.recording.forms
        inputs = {
            storage_key(v)
            for node, v in self.values.items()
            if (node.op in ("placeholder", "get_attr") or node in self._given)
            and isinstance(v, torch.Tensor)
        }
        escaping: dict[int, set[int]] = {}
        for tensor in tree_leaves([self.env[a] for a in output.all_input_nodes]):
            if isinstance(tensor, torch.Tensor):
                escaping.setdefault(storage_key(tensor), set()).add(id(tensor))
        shared = {key for key, tensors in escaping.items() if key in inputs or len(tensors) > 1}
        made: dict[tuple[fx.Node, int], list[Name]] = {}
        for name, home in self.homes.items():
            if home.node in self._index_of and forms[name].storage in shared:
                made.setdefault((home.node, forms[name].storage), []).append(name)
        for (node, key), names in made.items():
            if node in self._given:
                continue  # the trainer has it at hand
            read = _names_of(list(self.reads[node].values()))
            if len(names) > 1 or any(forms[name].storage == key for name in read):
                self._recorder.recording.pin(self._index_of[node], names, SHARES_MEMORY)


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


def _fake_arguments(
    mode: FakeTensorMode, inputs: Sequence[GraphInput], examples: Sequence[Any], symbolic: bool
) -> tuple[list[Any], SizeConditions]:
    arguments: list[Any] = [None] * len(inputs)
    conditions = SizeConditions([], [])
    for index, (item, example) in enumerate(zip(inputs, examples, strict=True)):
        if item.kind in ("int", "made"):
            continue
        if not (symbolic and item.kind == "leaf" and item.dynamic_dims):
            arguments[index] = mode.from_tensor(example, static_shapes=True)
            conditions.fixed_sizes += [(index, d, example.shape[d]) for d in item.dynamic_dims]
            continue
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[
                DimDynamic.DYNAMIC if dim in item.dynamic_dims else DimDynamic.STATIC
                for dim in range(example.dim())
            ]
        )
        source = torch._dynamo.source.ConstantSource(f"leaf{item.leaf_index}")
        fake = mode.from_tensor(example, source=source, symbolic_context=context)
        arguments[index] = fake
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                conditions.bindings.append(SizeBinding(size.node.expr, index, dim))
            elif dim in item.dynamic_dims:
                conditions.fixed_sizes.append((index, dim, example.shape[dim]))
    for index, (item, example) in enumerate(zip(inputs, examples, strict=True)):
        if item.kind == "leaf":
            conditions.strides.append((index, tuple(arguments[index].stride())))
        if item.kind != "int":
            continue
        if item.size_of is not None:
            base, dim = item.size_of
            arguments[index] = arguments[base].shape[dim]
        else:
            arguments[index] = int(example)
            conditions.fixed_ints.append((index, int(example)))
    return arguments, conditions


def _join(call_count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers the calls so that joined ones have the same number, the smallest of them."""
    unit_of = list(range(call_count))

    def root(index: int) -> int:
        while unit_of[index] != index:
            index = unit_of[index]
        return index

    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        unit_of[high] = low
    return [root(index) for index in range(call_count)]
