# SPDX-License-Identifier: Apache-2.0
"""Capture a graph with Dynamo, classify its inputs, and find the reasons to refuse it.

A source name alone does not identify an input: a slice of a batch looks like the batch, and a
buffer can look like a local variable. So inputs are compared by identity with the batch's tensors
and with the model's buffers. Every other input is state, and stays with the trainer, unless it is a
constant of a module or of the global scope.

Some captured graphs mean more than their operators show, or are wrong: Dynamo recorded something
different from the program, and then the trainer has to run the program itself. Some process-wide
settings change the meaning of operators, and workers use the defaults. Autocast is not such a
setting, since its casts are separate operators after a graph is lowered; its state is part of a
graph's meaning.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from penstock.compat.devices import accelerator_type
from penstock.compat.dynamo import Source, TensorPropertySource, is_from_local_source, source_of
from penstock.compat.fake_tensors import ConstantSource, FakeTensor, FakeTensorMode
from penstock.compat.modules import graph_module
from penstock.compat.operators import (
    AUTOCAST_BEGIN,
    AUTOCAST_END,
    HigherOrderOperator,
    OpOverload,
    is_under_transform,
)
from penstock.graph.sizes import SizeBinding, SizeConditions, Unlowerable, Unrunnable

LeafLookup = Callable[[torch.Tensor], int | None]

# A "made" input is computed in the graph itself, by an expression in front of the captured calls.
InputKind = Literal["leaf", "const", "state", "int", "made"]

# Optimizers give different bits under Dynamo than under Python.
OPTIMIZER_FILES = os.sep + os.path.join("torch", "optim", "")
# After these calls, Dynamo still uses the tensor's former metadata: if the program then reads a
# shape, it gets the old one (torch 2.11; test_random_model_regressions.py has programs that show
# it).
STALE_SHAPES = frozenset(
    {"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)

MODULE_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
MEMBER_PATH = re.compile(
    r"L\['\w+'\](?:\.__self__)?(?:\._(?:modules|parameters|buffers)\['[^']+'\])+"
)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of a captured graph, without its value."""

    label: str
    place: Literal["module", "global", "local"]
    is_tensor: bool
    dynamic_dims: tuple[int, ...]
    size_of: tuple[int, int] | None
    is_parameter: bool = False  # a tensor of a batch is never one


@dataclass(frozen=True)
class Captured:
    graph_module: fx.GraphModule
    placeholders: list[Placeholder]
    examples: list[Any]


class SeveralGraphs(Unlowerable):
    """Raised for a call that Dynamo cannot capture as one graph."""


class CaptureAborted(Exception):
    """Stops Dynamo once a graph is captured, before any of it runs."""


@dataclass(frozen=True)
class GraphInput:
    """The meaning of one input of a captured graph."""

    kind: InputKind
    label: str  # Dynamo's name of the source: L['self']._buffers['mean']
    leaf_index: int = -1
    dynamic_dims: tuple[int, ...] = ()
    size_of: tuple[int, int] | None = None  # for an int that is a size: the input and its dimension
    is_absent: bool = False  # state only because it has no values: a constant on the meta device


def read_placeholders(graph_module: fx.GraphModule) -> list[Placeholder]:
    """Read Dynamo's notes on each input; call only while Dynamo compiles."""
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
    """Return the kind of each argument. The keys of `buffers` are ids."""
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
            is_absent = (
                isinstance(value, FakeTensor)
                and not (value.requires_grad or place.is_parameter)
                and (place.place != "local" or id(value) in buffers)
            )
            kind = GraphInput(
                "state", place.label, dynamic_dims=place.dynamic_dims, is_absent=is_absent
            )
        inputs.append(kind)
    return inputs


def is_plain(value: torch.Tensor) -> bool:
    """Return whether a worker could hold this tensor's content: strided, without a history."""
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
    """Capture one call as one graph without running any of it.

    Raises:
        Unlowerable: the call cannot be captured; the message is the reason. Its subclass
            SeveralGraphs is raised if the call needs several graphs.
    """
    captured: list[Captured] = []

    def backend(dynamos: fx.GraphModule, examples: Sequence[Any]) -> Any:
        # From torch 2.12 on, Dynamo empties a graph whose compilation fails. A deep copy has new
        # nodes with the same metadata and the same tensors.
        kept = graph_module(dynamos, copy.deepcopy(dynamos.graph))
        captured.append(Captured(kept, read_placeholders(dynamos), list(examples)))
        raise CaptureAborted

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        if not captured:
            raise SeveralGraphs(
                f"the model is not a single graph: {first_sentence(error)}"
            ) from error
    if not captured:
        raise Unlowerable("nothing to move: no tensor operator was captured")
    # Dynamo keeps the backend, and therefore the list, until the process ends.
    last = captured[-1]
    captured.clear()
    return last


def first_sentence(error: BaseException) -> str:
    """Return the line of a Dynamo error that names its subject."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def tie_sizes(inputs: Sequence[GraphInput]) -> list[GraphInput]:
    """Tie integers that are a symbolic size of a leaf to it; all others are independent."""
    tied: list[GraphInput] = []
    for item in inputs:
        if item.size_of is not None:
            base, dim = item.size_of
            if inputs[base].kind != "leaf" or dim not in inputs[base].dynamic_dims:
                item = GraphInput("int", item.label)
        tied.append(item)
    return tied


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


def fake_inputs(
    mode: FakeTensorMode, inputs: Sequence[GraphInput], examples: Sequence[Any], symbolic: bool
) -> tuple[list[Any], SizeConditions]:
    """Return arguments in `mode` for a captured graph, and the conditions on other arguments.

    For arguments that meet the conditions, the graph does the same. With `symbolic`, dynamic
    dimensions of leaves are symbols.
    """
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
        source = ConstantSource(f"leaf{item.leaf_index}")
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


def refuse_by_construction(graph_module: fx.GraphModule) -> None:
    """Reject graphs whose operators do not show their full meaning.

    Raises:
        Unlowerable: the graph means more than its operators show.
        Unrunnable: not even the trainer may run the graph.
    """
    begun = Counter(node.target for node in graph_module.graph.nodes if node.op == "call_function")
    if begun[AUTOCAST_BEGIN] != begun[AUTOCAST_END]:
        raise Unlowerable("autocast is entered or left inside a captured part of forward")
    for node in graph_module.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if isinstance(node.target, HigherOrderOperator):
            # Some of them (checkpointing) give different bits than eager does.
            raise Unrunnable(f"the model uses the higher-order operator {node.target}")
        is_number = isinstance(node.meta.get("example_value"), torch.SymFloat)
        if node.meta.get("unbacked_bindings") and not is_number:
            # Dynamo asserts its assumption about that size; eager assumes no size.
            raise Unrunnable(f"{call_label(node)} returns a tensor whose size depends on values")
        if _is_split_addcdiv(node):
            raise Unrunnable(f"{call_label(node)} is one operator in eager and three in Dynamo")
        if node.op in ("call_method", "call_function") and name in STALE_SHAPES:
            raise Unrunnable(
                f"{call_label(node)} changes the shape of a tensor in place, which Dynamo cannot"
                f" track; use {name.removesuffix('_')}, which returns another tensor"
            )
        if OPTIMIZER_FILES in (node.meta.get("stack_trace") or ""):
            raise Unrunnable("the code that reads the batch also steps an optimizer")
        if node.op == "call_function" and name == "_enter_inference_mode":
            raise Unlowerable("forward switches inference_mode")
        if node.op == "call_function" and name.endswith("_increment_nesting"):
            # Its levels are process-wide: a walk that ends between two of them leaves one active.
            raise Unlowerable("forward uses a torch.func transform")
        if node.op == "call_module":
            raise Unlowerable(f"the module {node.target} was not inlined")


def refuse_by_surroundings() -> None:
    """Raise Unlowerable if the meaning of operators depends on more than their arguments."""
    if torch.get_default_dtype() is not torch.float32:
        raise Unlowerable(f"the default dtype is {torch.get_default_dtype()}, not torch.float32")
    if is_under_transform():
        raise Unlowerable("forward runs under a torch.func transform")


def _is_split_addcdiv(node: fx.Node) -> bool:
    """Return whether `node` is Dynamo's decomposition of `torch.addcdiv(x, a, b, value=v)`.

    Dynamo always decomposes this call; the parts round three times, where eager rounds once or
    twice.
    """
    calls = [node]
    for target in (torch.mul, torch.div):
        operand = calls[-1].args[-1 if target is torch.mul else 0] if calls[-1].args else None
        if not isinstance(operand, fx.Node) or operand.target is not target:
            return False
        calls.append(operand)
    traces = {call.meta.get("stack_trace") for call in calls}
    return node.target is torch.add and len(traces) == 1


def call_label(node: fx.Node) -> str:
    """Return the operator and its source line for messages: `interpolate at model.py:12`."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if isinstance(node.target, OpOverload):
        target = target.partition(".")[0]  # the program does not name the overload
    return f"{target or node.target} at {source_line(node)}" if source_line(node) else str(target)


def source_line(node: fx.Node) -> str:
    """Return the innermost line of the user's program (`model.py:12`), or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    line = lines[-1].rpartition("line ")[2].split(",")[0]
    return f"{parts[1].rpartition('/')[2]}:{line}"


def format_source(label: str) -> str:
    """Return `net.0.weight` for `L['self']._modules['net']._modules['0']._parameters['weight']`."""
    members = MODULE_MEMBER.findall(label)
    return ".".join(members) if MEMBER_PATH.fullmatch(label) else label


class AutocastState(NamedTuple):
    """The current autocast settings of the CPU and of the process's other devices."""

    cpu: torch.dtype | None  # None: off
    device: torch.dtype | None

    @classmethod
    def now(cls) -> AutocastState:
        return cls(_autocast_dtype("cpu"), _autocast_dtype(device_type()))

    @property
    def enabled(self) -> list[tuple[str, torch.dtype]]:
        """Return the device types for which autocast is on, with the dtypes that it casts to."""
        pairs = (("cpu", self.cpu), (device_type(), self.device))
        return [(device, dtype) for device, dtype in pairs if dtype is not None]


def device_type() -> str:
    """Return the type of the process's devices other than the CPU; "cuda" if it has none."""
    return accelerator_type() or "cuda"


class autocast_restored:  # noqa: N801 - used as a function
    """Restores autocast on exit, even if an error leaves a region of a graph in the middle.

    It is not a contextlib generator, because that writes to the error's ``__traceback__``, which
    some error classes reject.
    """

    def __enter__(self) -> None:
        self._enabled = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
            for d in ("cpu", device_type())
        ]
        self._depth = _autocast_depth()
        self._is_cached = torch.is_autocast_cache_enabled()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        while _autocast_depth() > self._depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for device, is_enabled, dtype in self._enabled:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._is_cached)


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _autocast_depth() -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth
