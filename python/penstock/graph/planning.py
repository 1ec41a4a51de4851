# SPDX-License-Identifier: Apache-2.0
"""Plan a cut of a lowered graph: run the native analysis on its text and read the plan back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from penstock import _C
from penstock.compat.operators import tree_leaves
from penstock.errors import PenstockError
from penstock.graph.constants import is_same_bits
from penstock.graph.emission import Emission, emit
from penstock.graph.expression import Result, expressions_of
from penstock.graph.link import Link
from penstock.graph.lowering import Lowering, leaves_of
from penstock.graph.native_plan import (
    RecordedMemory,
    make_plans,
    read_flow,
    read_plan,
    recorded_devices,
    recorded_extents,
    recorded_memory,
    state_reasons,
)
from penstock.graph.plan import Plan
from penstock.graph.recording import PINNED, Form, Name
from penstock.graph.sizes import Unlowerable, evaluate, has_unknown
from penstock.graph.suffix import CannotMove, build_reference, build_suffix
from penstock.graph.tolerance import Tolerance, with_differences

CutMode = Literal["auto", "maximal", "none"]

# Limit of calls that turn out to have to stay, one after another. Each costs a calibration run.
PINS_MAX = 8
# Operators that may run once more in the trainer, regardless of the rest of their unit.
COMPUTES_NOTHING = ("opaque::", "size::", "list::", "aten::_linalg_check_errors")


@dataclass(frozen=True, slots=True)
class CutOptions:
    """The options of `offload` or `explain`."""

    mode: CutMode
    allow_random: bool
    worker_count: int
    draws_of: str = ""  # name of the graph whose draws may move; another name gives other numbers
    link: Link | None = None  # link to a pool's workers
    tolerance: Tolerance | None = None  # tolerance for a device's results

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "maximal", "none"):
            raise ValueError(f'cut must be "auto", "maximal" or "none", got {self.mode!r}')

    def prices(self) -> _C.Prices:
        """Return the prices before the loader has run."""
        if self.link is None:
            return _C.Prices.of_local_workers(self.worker_count)
        workers, bytes_per_s, sends_whole = self.link
        return _C.Prices.of_pool(workers, link_bytes_per_s=bytes_per_s, sends_whole=sends_whole)


Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class BoundaryValue:
    """One tensor that crosses the cut."""

    name: Name
    key: str
    unit: int  # unit of the call that makes it, with the calls that move with that
    operator: str  # label of the call that makes it, for messages
    is_random: bool
    form: Form
    leaf: int | None = None  # for a copy of an input on a device, which no worker sends: that input
    # The units behind it that move by the tolerance, with their calls. If empty, a worker's result
    # is bit-for-bit identical.
    inexact: Mapping[int, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return the device on which the trainer reads it."""
        return self.form.device

    def layout(self, values: dict[sympy.Symbol, sympy.Integer]) -> Layout:
        """Return dtype, shape and strides for one combination of sizes."""
        return (
            self.form.dtype,
            tuple(evaluate(size, values) for size in self.form.sizes),
            tuple(evaluate(stride, values) for stride in self.form.strides),
        )


@dataclass(frozen=True)
class PlannedCut:
    """A plan and the programs that implement it.

    Without boundary values, all calls stay and the remaining fields are empty.
    """

    plan: Plan
    boundary: list[BoundaryValue]
    prefix: str = ""
    prefix_constants: tuple[torch.Tensor, ...] = ()
    seed: int = 0  # seed of the prefix's random draws
    constant_inputs: tuple[int, ...] = ()  # graph inputs that the prefix has copies of
    results: tuple[Result, ...] = ()  # returned values that depend only on the batch
    suffix: fx.GraphModule | None = None
    reference: fx.GraphModule | None = None  # computes the boundary values that are not random
    native: _C.PricedPlans | None = None  # the priced plans with this choice, for other prices
    differences: tuple[float, ...] = ()  # by boundary value, on the batch of the plan

    @property
    def behind(self) -> list[Mapping[int, str]]:
        """Return the units behind each boundary value that move by the tolerance."""
        return [item.inexact for item in self.boundary]


def plan_cut(
    lower_graph: Callable[[bool], Lowering],
    inputs: Sequence[Any],
    leaf_count: int,
    options: CutOptions,
    mismatched: Mapping[int, str] = MappingProxyType({}),
) -> tuple[Lowering, PlannedCut]:
    """Lower (with symbolic sizes if possible), time and cut a graph for inputs like `inputs`.

    The movable operators are run, on `inputs`; parameters, buffers and random generators do not
    change. Units that are `mismatched` stay, with the reason given there.

    Raises:
        Unlowerable: no plan is possible; the message is the reason.
    """

    how = Planning(options, set(mismatched))

    def plan(lowering: Lowering) -> tuple[Lowering, PlannedCut]:
        _pin(lowering, mismatched)
        return lowering, _plan(lowering, inputs, leaf_count, how)

    try:
        lowering = lower_graph(True)
        if lowering.conditions.bindings:
            return plan(lowering)
    except Unlowerable:
        lowering = lower_graph(False)
    return plan(lowering)


def plan_again(
    lowering: Lowering,
    inputs: Sequence[Any],
    leaf_count: int,
    options: CutOptions,
    mismatched: Set[int],
    prices: _C.Prices,
    calibration: Any,
) -> PlannedCut:
    """Plan another cut of a graph that was planned before, by the loader's present measurements.

    No timing takes place. Raises like :func:`plan_cut`, and leaves the former plan unchanged.
    """
    return _plan_once(
        lowering, inputs, leaf_count, Planning(options, mismatched, prices, calibration)
    )


@dataclass(frozen=True)
class Planning:
    """How to plan, in addition to the graph and its inputs."""

    options: CutOptions
    mismatched: Set[int] = frozenset()
    prices: _C.Prices | None = None
    calibration: Any = None


def _pin(lowering: Lowering, mismatched: Mapping[int, str]) -> None:
    """Make units stay."""
    recording = lowering.recording
    for op in list(recording.ops):
        reason = mismatched.get(lowering.unit_of[op.call_index])
        if reason is not None and op.outputs:
            recording.pin(op.call_index, op.outputs[:1], reason)


@contextlib.contextmanager
def native_refusals() -> Iterator[None]:
    """Convert an error of the native part into a refusal with the error's text as the reason."""
    try:
        yield
    except (ValueError, RuntimeError, PenstockError) as error:
        raise Unlowerable(str(error).partition("\n")[0]) from error


def price_plans(
    graph: Any,
    leaves: list[torch.Tensor],
    held: Sequence[torch.Tensor | None],
    how: Planning,
    memory: RecordedMemory | None = None,
    may_be_inexact: Set[str] = frozenset(),
) -> _C.PricedPlans:
    return make_plans(
        graph,
        leaves,
        held,
        mode=how.options.mode,
        allow_random=how.options.allow_random,
        prices=how.prices or how.options.prices(),
        calibration=how.calibration,
        memory=memory,
        may_be_inexact=may_be_inexact,
    )


class _OutOfTolerance(Unlowerable):
    """Raised for units that differ by more than the tolerance. Another plan may omit them."""

    def __init__(self, units: Mapping[int, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(units.values())))
        self.units = units


def _plan(
    lowering: Lowering,
    inputs: Sequence[Any],
    leaf_count: int,
    how: Planning,
) -> PlannedCut:
    pinned: set[int] = set()
    while True:
        try:
            return _plan_once(lowering, inputs, leaf_count, how)
        except _OutOfTolerance as fault:
            _pin(lowering, fault.units)
        except CannotMove as fault:
            if fault.call_index in pinned or len(pinned) >= PINS_MAX:
                raise
            pinned.add(fault.call_index)
            lowering.recording.pin(fault.call_index, fault.values, str(fault))


def _plan_once(
    lowering: Lowering,
    inputs: Sequence[Any],
    leaf_count: int,
    how: Planning,
) -> PlannedCut:
    """Make one attempt.

    Raises:
        CannotMove: only a plan that moves one call fewer can be implemented.
        _OutOfTolerance: only a plan in which fewer calls move by the tolerance can be implemented.
    """
    leaves = leaves_of(lowering, inputs, leaf_count)
    emission = emit(lowering, inputs)
    memory = recorded_memory(lowering)
    with native_refusals():
        graph = _C.parse_graph(emission.text)
        graph.put_equal_twins()
        graph.annotate()
        is_exact = how.options.tolerance is None
        may_be_inexact = frozenset() if is_exact else _floating_values(lowering)
        plans = price_plans(graph, leaves, emission.held, how, memory, may_be_inexact)
        native = plans.chosen
        verdicts = plans.verdicts
        inexact = _inexact_units(lowering, emission, verdicts)
        exact = None
        if any(_unit(group) in inexact for group in native.moved):
            again = replace(how, calibration=plans.calibration)
            exact = price_plans(graph, leaves, emission.held, again, memory)
        prefix = _C.extract_prefix(graph, native, how.options.draws_of, _C.kernel_settings())
    flow = read_flow(graph, recorded_extents(lowering, inputs), recorded_devices(lowering))
    in_front = {lowering.unit_of[lowering.nodes.index(node)] for node in lowering.in_front}
    plan = read_plan(plans, flow, state_reasons(lowering), in_front, inexact, exact)
    calls = _calls(lowering)
    for text in prefix.output_names:
        name = Name(f"%{text}")
        if lowering.recording.forms[name].is_lazy and name not in lowering.given:
            # A slab holds memory and not the way to read it, so this view is made where it is
            # needed.
            raise CannotMove(
                f"{name} is a lazily conjugated or negated tensor", calls[name], [name]
            )
    changing = _changing_units(lowering, emission, verdicts)
    results = tuple(expressions_of(lowering, changing | how.mismatched))
    kept = {_unit(group) for group in native.kept if not group.replicated}
    units = {name: lowering.unit_of[call] for name, call in calls.items()}
    labels = {_unit(group): group.label for group in native.moved}
    unit_labels = {_unit(group): group.label for group in (*native.moved, *native.kept)}
    is_inexact = {
        name: verdicts[node].is_inexact
        for op, node in zip(lowering.recording.ops, emission.nodes, strict=True)
        for name in op.outputs
    }
    random_units = {_unit(group) for group in native.moved if group.level == "RANDOM"}
    boundary = [
        BoundaryValue(
            name=name,
            key=key,
            unit=units[name],
            operator=labels[units[name]],
            is_random=units[name] in random_units,
            form=lowering.recording.forms[name],
            leaf=_placed_leaf(lowering, name) if name in emission.placed else None,
            inexact={
                unit: unit_labels[unit]
                for unit in (_upstream_units(lowering, name) if is_inexact[name] else ())
                if unit in inexact
            },
        )
        for text, key in zip(prefix.output_names, prefix.output_keys, strict=True)
        if (name := Name(f"%{text}")) not in lowering.given
    ]
    for item in boundary:
        if any(has_unknown(_expression(size)) for size in (*item.form.sizes, *item.form.strides)):
            raise Unlowerable(f"the size of the result of {item.operator} depends on values")
    if not boundary:
        return PlannedCut(plan, [], results=results, native=plans)
    # A prefix does not send values that the trainer already has.
    at_hand = {item.name.bare for item in boundary if item.leaf is not None}
    shipped = prefix.without_outputs(memory.known_outside | at_hand)
    constants = [f"%{name}" for name in shipped.constant_names]
    tensors = [emission.constants[text] for text in constants]
    checked = [item.name for item in boundary if not item.is_random]
    planned = PlannedCut(
        plan=plan,
        boundary=boundary,
        prefix=str(shipped) if len(at_hand) < len(boundary) else "",
        prefix_constants=tuple(tensors),
        seed=_seed_of_prefix(how.options.draws_of),
        constant_inputs=tuple(
            lowering.input_names[Name(text)]
            for text in constants
            if Name(text) in lowering.input_names
        ),
        results=results,
        suffix=build_suffix(lowering, kept, set(labels), [item.name for item in boundary]),
        reference=build_reference(lowering, kept - _run_by_both(lowering, shipped), checked),
        native=plans,
    )
    differences = _check_fidelity(planned, lowering, inputs, leaves, how.options.tolerance)
    plan = with_differences(plan, planned.behind, differences, how.options.tolerance)
    return replace(planned, plan=plan, differences=differences)


def _seed_of_prefix(draws_of: str) -> int:
    """Return the seed of the graph with draws of this name: 64 bits of the name's SHA-256."""
    return int.from_bytes(sha256(draws_of.encode()).digest()[:8], "little")


def _placed_leaf(lowering: Lowering, name: Name) -> int:
    """Return the graph input of which this value is a copy on a device: a leaf."""
    makers = {made: op for op in lowering.recording.ops for made in op.outputs}
    while name not in lowering.input_names:
        name = makers[name].args[0]
    return lowering.input_names[name]


def _unit(group: _C.PlanGroup) -> int:
    """Return the number of a unit: each operator of a lowering belongs to one."""
    assert group.group is not None
    return group.group


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _changing_units(lowering: Lowering, emission: Emission, verdicts: Sequence[Any]) -> set[int]:
    """Return the units that depend on more than the batch, whether or not they have to stay."""
    return {
        lowering.unit_of[op.call_index]
        for op, node in zip(lowering.recording.ops, emission.nodes, strict=True)
        if op.target != PINNED and verdicts[node].level in ("RANDOM", "STATE")
    }


def _floating_values(lowering: Lowering) -> frozenset[str]:
    """Return the names of the floating-point tensors."""
    return frozenset(
        name.bare
        for name, form in lowering.recording.forms.items()
        if form.dtype.is_floating_point or form.dtype.is_complex
    )


def _inexact_units(
    lowering: Lowering, emission: Emission, verdicts: Sequence[Any]
) -> dict[int, str]:
    """Return the units that may move although a CPU gives other bits than their device.

    The values are the reasons.
    """
    return {
        lowering.unit_of[op.call_index]: verdicts[node].reason
        for op, node in zip(lowering.recording.ops, emission.nodes, strict=True)
        if op.target != PINNED and verdicts[node].has_other_bits
    }


def _upstream_units(lowering: Lowering, name: Name) -> set[int]:
    """Return the units that a value depends on."""
    makers = {made: op for op in lowering.recording.ops for made in op.outputs}
    units: set[int] = set()
    seen: set[Name] = set()
    pending = [name]
    while pending:
        op = makers.get(one := pending.pop())
        if op is None or one in seen:
            continue
        seen.add(one)
        units.add(lowering.unit_of[op.call_index])
        read = tree_leaves([op.args, list(op.kwargs.values())])
        pending += [value for value in read if isinstance(value, Name)]
    return units


def _calls(lowering: Lowering) -> dict[Name, int]:
    return {name: op.call_index for op in lowering.recording.ops for name in op.outputs}


def _run_by_both(lowering: Lowering, prefix: _C.Graph) -> set[int]:
    """Return the units of which the prefix has every operator, whether or not they stay.

    An example is a view of a constant that the model also returns.
    """
    made = prefix.made_names
    operators = [op for op in lowering.recording.ops if not op.target.startswith(COMPUTES_NOTHING)]
    elsewhere = {
        lowering.unit_of[op.call_index]
        for op in operators
        if made.isdisjoint(name.bare for name in op.outputs)
    }
    return {lowering.unit_of[op.call_index] for op in operators} - elsewhere


def _check_fidelity(
    planned: PlannedCut,
    lowering: Lowering,
    inputs: Sequence[Any],
    leaves: list[torch.Tensor],
    tolerance: Tolerance | None,
) -> tuple[float, ...]:
    """Compare the prefix with its original calls on this very batch.

    Results are compared bit for bit, or by the tolerance for calls that move by it. Return the
    differences of the boundary values. The comparison catches an operator that lowering
    misinterpreted and a layout that fake tensors mispredict.
    """
    assert planned.reference is not None
    with torch.inference_mode(False), torch.no_grad():
        executor = _C.Executor(
            _C.parse_graph(planned.prefix or "penstock-ir 1\n"),
            list(planned.prefix_constants),
            allow_random=any(item.is_random for item in planned.boundary),
        )
        try:
            made = iter(executor.run(leaves, planned.seed))
        except PenstockError as error:
            raise Unlowerable(str(error).partition("\n")[0]) from error
        expected = planned.reference(*inputs)
    checked = [
        (item, value)
        for item in planned.boundary
        for value in (inputs[item.leaf] if item.leaf is not None else next(made),)
        if not item.is_random
    ]
    conditions = lowering.conditions
    values = conditions.values(conditions.sizes(inputs))
    differences: dict[Name, float] = {}
    beyond: dict[int, str] = {}
    for (item, value), reference in zip(checked, expected, strict=True):
        if item.inexact:
            assert tolerance is not None
            difference = tolerance.difference(value.cpu(), reference.cpu())
            differences[item.name] = difference
            if difference > tolerance.largest:
                beyond.update(dict.fromkeys(item.inexact, tolerance.excess_reason(difference)))
        elif not is_same_bits(value.cpu(), reference.cpu()):
            reason = f"{item.operator} returns other bits in a worker than in the trainer"
            raise CannotMove(reason, _calls(lowering)[item.name], [item.name])
        layout = (reference.dtype, tuple(reference.shape), reference.stride())
        if layout != item.layout(values):
            raise CannotMove(
                f"{item.operator} makes a tensor with the layout {layout}, "
                f"expected {item.layout(values)}",
                _calls(lowering)[item.name],
                [item.name],
            )
    if beyond:
        raise _OutOfTolerance(beyond)
    return tuple(differences.get(item.name, 0.0) for item in planned.boundary)


# Limit of runs of unchecked batches that are kept, enough for as many epochs.
RUNS_MAX = 32


class UncheckedBatches:
    """The batches used without a comparison since the last successful one.

    With a very large `verify_every`, these may be all batches of a training, so they are kept as
    runs.
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[int, int, int]] = deque(maxlen=RUNS_MAX)  # epoch, first, last
        self._has_dropped = False

    def add(self, epoch: int, sequence: int) -> None:
        if self._runs:
            last_epoch, first, last = self._runs[-1]
            if last_epoch == epoch and last <= sequence <= last + 1:
                self._runs[-1] = (epoch, first, sequence)
                return
        self._has_dropped |= len(self._runs) == RUNS_MAX
        self._runs.append((epoch, sequence, sequence))

    def clear(self) -> None:
        self._runs.clear()
        self._has_dropped = False

    def __str__(self) -> str:
        """Return the batches as text for users."""
        if not self._runs:
            return "No batch was used without a comparison since the last correct one"
        parts = [
            f"{first} to {last} of epoch {epoch}" if last > first else f"{first} of epoch {epoch}"
            for epoch, first, last in self._runs
        ]
        if self._has_dropped:
            parts.insert(0, "many before")
        return f"Used without a comparison since the last correct one: batch {', '.join(parts)}"
