# SPDX-License-Identifier: Apache-2.0
"""From a lowering to a cut: hands the text to the native analysis and reads its plan back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from penstock import _C
from penstock.constants import is_same_bits
from penstock.emission import emit
from penstock.errors import PenstockError
from penstock.lowering import Lowering
from penstock.plan import Plan, PlannedCall
from penstock.recording import Form, Name
from penstock.sizes import Unlowerable, evaluate
from penstock.suffix import MustStay, build_reference, build_suffix

CutMode = Literal["auto", "maximal", "none"]

MODULE_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
# How many calls may turn out to have to stay, one after the other. Each costs a calibration run.
PINS_MAX = 8
# Operators that may run once more in the trainer whatever they stand beside.
COMPUTES_NOTHING = ("opaque::", "size::", "list::", "aten::_linalg_check_errors")
VALUE_NAME = re.compile(r"%\w+")
CONSTANT_LINE = re.compile(r"^input (%\S+) const ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CutOptions:
    """What the caller of `offload` or `explain` asked for."""

    mode: CutMode
    allow_random: bool
    worker_count: int

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "maximal", "none"):
            raise ValueError(
                f'cut is {self.mode!r} but a mode was expected; pass "auto", "maximal" or "none"'
            )


Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class BoundaryValue:
    """One tensor that crosses the cut."""

    name: Name
    key: str
    operator: str  # the call that makes it, for messages
    is_random: bool
    form: Form

    def layout(self, values: dict[sympy.Symbol, sympy.Integer]) -> Layout:
        """Dtype, shape and strides for one combination of sizes."""
        return (
            self.form.dtype,
            tuple(evaluate(size, values) for size in self.form.sizes),
            tuple(evaluate(stride, values) for stride in self.form.strides),
        )


@dataclass(frozen=True)
class PlannedCut:
    """A plan and what carries it out. Without boundary values nothing moves and the rest is
    empty."""

    plan: Plan
    boundary: list[BoundaryValue]
    prefix: str = ""
    prefix_constants: tuple[torch.Tensor, ...] = ()
    constant_inputs: tuple[int, ...] = ()  # graph inputs that the prefix has copies of
    suffix: fx.GraphModule | None = None
    reference: fx.GraphModule | None = None  # computes the boundary values that are not random


def plan_cut(
    lower_graph: Callable[[bool], Lowering],
    inputs: Sequence[Any],
    leaf_count: int,
    options: CutOptions,
) -> tuple[Lowering, PlannedCut]:
    """Lowers (with symbolic sizes if that works), times and cuts a graph for inputs like `inputs`.

    The movable operators are run, on `inputs`; parameters, buffers and random generators stay as
    they are. Raises Unlowerable with the reason when there can be no plan.
    """
    try:
        lowering = lower_graph(True)
        if lowering.conditions.bindings:
            return lowering, _plan(lowering, inputs, leaf_count, options)
    except Unlowerable:
        lowering = lower_graph(False)
    return lowering, _plan(lowering, inputs, leaf_count, options)


def plan_script(module: Any, leaves: Sequence[torch.Tensor], options: CutOptions) -> Plan:
    """The plan of a TorchScript module, read by the native front end."""
    with _refusals():
        graph, constants = _C.capture_torchscript(module, list(leaves))
        return read_plan(_native_plan(graph, list(leaves), constants, options))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What the native part will not take is a refusal with its text as the reason."""
    try:
        yield
    except (ValueError, RuntimeError, PenstockError) as error:
        raise Unlowerable(str(error).partition("\n")[0]) from error


def _native_plan(
    graph: Any,
    leaves: list[torch.Tensor],
    held: Sequence[torch.Tensor | None],
    options: CutOptions,
) -> Any:
    verdicts = _C.analyse_effects(graph, allow_random=options.allow_random)
    calibration = _C.calibrate(graph, verdicts, leaves, list(held))
    # Local workers share their memory with the trainer, so the raw batch is there in any case.
    return _C.make_plan(
        graph,
        verdicts,
        calibration,
        cut=options.mode,
        worker_count=options.worker_count,
        raw_stays=True,
    )


def _plan(
    lowering: Lowering, inputs: Sequence[Any], leaf_count: int, options: CutOptions
) -> PlannedCut:
    pinned: set[int] = set()
    while True:
        try:
            return _plan_once(lowering, inputs, leaf_count, options)
        except MustStay as fault:
            if fault.call_index in pinned or len(pinned) >= PINS_MAX:
                raise
            pinned.add(fault.call_index)
            lowering.recording.pin(fault.call_index, fault.values)


def _plan_once(
    lowering: Lowering, inputs: Sequence[Any], leaf_count: int, options: CutOptions
) -> PlannedCut:
    """One attempt; raises MustStay when only a plan with one call fewer can be carried out."""
    leaves = _leaves(lowering, inputs, leaf_count)
    emission = emit(lowering, inputs)
    with _refusals():
        graph = _C.parse_graph(emission.text)
        graph.annotate()
        native = _native_plan(graph, leaves, emission.held, options)
        prefix = _C.extract_prefix(graph, native)
    plan = read_plan(native, _state_reasons(lowering))
    if not prefix.output_names:
        return PlannedCut(plan, [])
    prefix_text = str(prefix)
    crossing = [Name(f"%{name}") for name in prefix.output_names]
    calls = _calls(lowering)
    for name in crossing:
        if lowering.recording.forms[name].is_lazy:
            # A slab holds memory and not how it is read, so this view of it is made where it is
            # needed.
            raise MustStay(f"{name} is a lazy conjugate or negative", calls[name], [name])
    units = {name: lowering.unit_of[call] for name, call in calls.items()}
    labels = {group.group: group.label for group in native.moved}
    random_units = {group.group for group in native.moved if group.level == "RANDOM"}
    boundary = [
        BoundaryValue(
            name=name,
            key=key,
            operator=labels[units[name]],
            is_random=units[name] in random_units,
            form=lowering.recording.forms[name],
        )
        for name, key in zip(crossing, prefix.output_keys, strict=True)
    ]
    moved = set(labels)
    kept = {group.group for group in native.kept if not group.replicated}
    constants = CONSTANT_LINE.findall(prefix_text)
    tensors = [emission.constants[text] for text in constants]
    checked = [item.name for item in boundary if not item.is_random]
    planned = PlannedCut(
        plan=plan,
        boundary=boundary,
        prefix=prefix_text,
        prefix_constants=tuple(tensors),
        constant_inputs=tuple(
            lowering.input_names[Name(text)]
            for text in constants
            if Name(text) in lowering.input_names
        ),
        suffix=build_suffix(lowering, kept, moved, [item.name for item in boundary]),
        reference=build_reference(lowering, kept - _run_by_both(lowering, prefix_text), checked),
    )
    _check_fidelity(planned, lowering, inputs, leaves)
    return planned


def _calls(lowering: Lowering) -> dict[Name, int]:
    return {name: op.call_index for op in lowering.recording.ops for name in op.outputs}


def _run_by_both(lowering: Lowering, prefix: str) -> set[int]:
    """The units of which the prefix has every operator, whatever they are in the trainer: a view of
    a constant that the model also returns."""
    made = {
        name
        for line in prefix.splitlines()
        if not line.startswith(("input ", "output "))
        for name in VALUE_NAME.findall(line.partition(" = ")[0])
    }
    operators = [op for op in lowering.recording.ops if not op.target.startswith(COMPUTES_NOTHING)]
    elsewhere = {
        lowering.unit_of[op.call_index]
        for op in operators
        if made.isdisjoint(str(name) for name in op.outputs)
    }
    return {lowering.unit_of[op.call_index] for op in operators} - elsewhere


def _check_fidelity(
    planned: PlannedCut, lowering: Lowering, inputs: Sequence[Any], leaves: list[torch.Tensor]
) -> None:
    """Holds the prefix against the calls it came from, on this very batch, bit for bit.

    It catches an operator that lowering misread and a layout that fake tensors mispredict.
    """
    assert planned.reference is not None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        executor = _C.Executor(
            _C.parse_graph(planned.prefix),
            list(planned.prefix_constants),
            allow_random=any(item.is_random for item in planned.boundary),
        )
        try:
            made = executor.run(leaves)
        except PenstockError as error:
            raise Unlowerable(str(error).partition("\n")[0]) from error
        expected = planned.reference(*inputs)
    checked = [
        (item, value)
        for item, value in zip(planned.boundary, made, strict=True)
        if not item.is_random
    ]
    conditions = lowering.conditions
    values = conditions.values(conditions.sizes(inputs))
    for (item, value), reference in zip(checked, expected, strict=True):
        if not is_same_bits(value, reference):
            reason = f"{item.operator} gives other bits in a worker than in the trainer"
            raise MustStay(reason, _calls(lowering)[item.name], [item.name])
        layout = (reference.dtype, tuple(reference.shape), reference.stride())
        if layout != item.layout(values):
            raise MustStay(
                f"{item.operator} makes a tensor of the layout {layout}, "
                f"where {item.layout(values)} was expected",
                _calls(lowering)[item.name],
                [item.name],
            )


def _leaves(lowering: Lowering, inputs: Sequence[Any], leaf_count: int) -> list[torch.Tensor]:
    """All tensors of the batch by number; those that the model was not given are empty."""
    leaves = [torch.empty(0) for _ in range(leaf_count)]
    for item, value in zip(lowering.inputs, inputs, strict=True):
        if item.kind == "leaf":
            leaves[item.leaf_index] = value
    return leaves


def _state_reasons(lowering: Lowering) -> dict[int, str]:
    """By unit, the parameter or state that a call reads: for people it says more than the operators
    that the call is made of."""
    reasons: dict[int, str] = {}
    for node, unit in zip(lowering.nodes, lowering.unit_of, strict=True):
        for name in tree_leaves(list(lowering.reads[node].values())):
            index = lowering.input_names.get(name) if isinstance(name, Name) else None
            if index is None:
                continue
            form = lowering.recording.forms[name]
            if (
                lowering.inputs[index].kind == "state"
                or form.storage in lowering.recording.mutated_storages
            ):
                label = lowering.inputs[index].label
                source = spoken_source(label)
                why = "training changes" if source != label else "is not the batch's own"
                reasons.setdefault(unit, f"it reads {source}, which {why}")
    return reasons


def spoken_source(label: str) -> str:
    """`net.0.weight` for `L['self']._modules['net']._modules['0']._parameters['weight']`."""
    members = MODULE_MEMBER.findall(label)
    return ".".join(members) if label.startswith("L['self']") and members else label


def read_plan(native: Any, state_reasons: Mapping[int, str] | None = None) -> Plan:
    """The native plan, in the words of the façade."""
    reasons = state_reasons or {}
    return Plan(
        moved=tuple(_call(group, "worker") for group in native.moved),
        kept=tuple(
            _call(
                group,
                "both" if group.replicated else "trainer",
                None if group.level != "STATE" else reasons.get(group.group),
            )
            for group in native.kept
        ),
        raw_bytes=native.raw_bytes,
        maximal_bytes=native.maximal_bytes,
        boundary_bytes=native.boundary_bytes,
        worker_s=native.worker_s,
        trainer_s=native.trainer_s,
    )


def _call(group: Any, place: str, reason: str | None = None) -> PlannedCall:
    return PlannedCall(
        operator=group.label or ", ".join(group.operators),
        place=place,
        reason=reason or group.reason,
        worker_s=group.worker_s,
        trainer_s=group.trainer_s,
    )
