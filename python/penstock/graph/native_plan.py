# SPDX-License-Identifier: Apache-2.0
"""Get plans from the native part and convert them for the façade.

A plan names the bytes that each call passes to each other call (csrc/graph/call_flow.h), and their
device. The capture has the sizes of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock import _C
from penstock.compat.operators import tree_leaves
from penstock.graph.capture import format_source
from penstock.graph.lowering import Lowering
from penstock.graph.plan import CutTotals, Plan, PlannedCall, PlannedEdge
from penstock.graph.recording import Name
from penstock.graph.sizes import evaluate

# By value: its bytes, and the number of its memory, which values that share memory have in common.
# Values of unknown size are left out.
Extents = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RecordedMemory:
    """A recording's facts about the values of its graph, by bare name.

    `known_outside` has the values that the program also holds, `numbers` the number of each value's
    memory.
    """

    known_outside: Set[str] = frozenset()
    numbers: Mapping[str, int] = field(default_factory=dict)


def recorded_memory(lowering: Lowering) -> RecordedMemory:
    """Return the memory of the values of a recording."""
    return RecordedMemory(
        {name.bare for name in lowering.given},
        {name.bare: form.storage for name, form in lowering.recording.forms.items()},
    )


def make_plans(
    graph: Any,
    leaves: list[torch.Tensor],
    held: Sequence[torch.Tensor | None],
    *,
    mode: str,
    allow_random: bool,
    prices: _C.Prices,
    calibration: Any = None,
    memory: RecordedMemory | None = None,
    may_be_inexact: Set[str] = frozenset(),
) -> _C.PricedPlans:
    """Return the requested plan and the plans that it is compared with, from one calibration.

    Time and price a graph; run the movable nodes on `leaves`, unless there is a `calibration` of
    exactly this graph. Without a recorded `memory`, values share memory wherever their operators
    allow it. For values in `may_be_inexact`, the last bits may differ from the device's results.
    """
    memory = memory or RecordedMemory()
    verdicts = _C.analyse_effects(
        graph, allow_random, memory.known_outside, memory.numbers, may_be_inexact
    )
    if calibration is None:
        calibration = _C.calibrate(graph, verdicts, leaves, list(held))
    return _C.PricedPlans(graph, verdicts, calibration, cut=mode, prices=prices)


def read_plan(
    plans: _C.PricedPlans,
    flow: CallFlow,
    reasons: Mapping[int, str] | None = None,
    hidden: Set[int] = frozenset(),
    inexact_reasons: Mapping[int, str] | None = None,
    exact: _C.PricedPlans | None = None,
) -> Plan:
    """Return the native plan without the `hidden` units, as a Plan.

    Units whose bits differ from the device's results move for `inexact_reasons`; `exact` has the
    plans in which these units stay.
    """
    reasons, inexact_reasons = reasons or {}, inexact_reasons or {}
    native: Any = plans.chosen
    return Plan(
        moved=tuple(
            _call(group, "worker", flow, inexact_reasons.get(group.group))
            for group in native.moved
            if group.group not in hidden
        ),
        kept=tuple(
            _call(
                group,
                "both" if group.replicated else "trainer",
                flow,
                reasons.get(group.group) if group.level == "STATE" else None,
            )
            for group in native.kept
            if group.group not in hidden
        ),
        raw_bytes=native.raw_bytes,
        maximal_bytes=native.maximal_bytes,
        boundary_bytes=native.boundary_bytes,
        worker_s=native.worker_s,
        trainer_s=native.trainer_s,
        totals=(
            CutTotals("none", *_totals(plans.none)),
            CutTotals("maximal", *_totals(plans.maximal)),
            CutTotals("chosen", *_totals(plans.chosen)),
            *(() if exact is None else (_exact_totals(plans, exact),)),
        ),
        link_bytes_per_s=_link_of(plans.prices),
        copy_bytes_per_s=plans.calibration.copy_bytes_per_s or None,
        edges=tuple(
            replace(edge, source=None) if edge.source in hidden else edge
            for edge in flow.edges
            if edge.target not in hidden
        ),
    )


def _totals(native: _C.Plan) -> tuple[float, float, int, int]:
    return native.worker_s, native.trainer_s, native.boundary_bytes, native.sent_bytes


def _exact_totals(plans: _C.PricedPlans, exact: _C.PricedPlans) -> CutTotals:
    """Return the costs of the plan in which calls with bits unlike their device's have to stay.

    They are comparable with the plans in which these calls may move: calls that stay here and may
    move there count as the trainer's work.
    """
    worker_s, _, boundary_bytes, sent_bytes = _totals(exact.chosen)
    moved = {group.group for group in exact.chosen.moved}
    trainer_s = sum(group.trainer_s for group in plans.none.kept if group.group not in moved)
    return CutTotals("exact", worker_s, trainer_s, boundary_bytes, sent_bytes)


def _link_of(prices: _C.Prices) -> float | None:
    return None if prices.link_bytes_per_s == math.inf else prices.link_bytes_per_s


def _call(group: Any, place: str, flow: CallFlow, reason: str | None = None) -> PlannedCall:
    return PlannedCall(
        index=group.group,
        operator=group.label or ", ".join(group.operators),
        place=place,
        reason=reason or group.reason,
        worker_s=group.worker_s,
        trainer_s=group.trainer_s,
        made_bytes=flow.made_bytes.get(group.group, 0),
        device=flow.devices.get(group.group),
    )


def state_reasons(lowering: Lowering) -> dict[int, str]:
    """Return by unit why a call stays, or the parameter or state that it reads.

    This is more informative for users than the operators of the call.
    """
    pins = lowering.recording.pins
    reasons = {lowering.unit_of[call_index]: reason for call_index, reason in pins.items()}
    for node, unit in zip(lowering.nodes, lowering.unit_of, strict=True):
        for name in tree_leaves(list(lowering.reads[node].values())):
            index = lowering.input_names.get(name) if isinstance(name, Name) else None
            if index is None:
                continue
            form = lowering.recording.forms[name]
            item = lowering.inputs[index]
            is_written = form.storage in lowering.recording.mutated_storages
            if item.kind == "state" or is_written:
                state = _format_state(item.label, item.is_absent and not is_written)
                reasons.setdefault(unit, f"it reads {state}")
    return reasons


def _format_state(label: str, is_absent: bool) -> str:
    source = format_source(label)
    if is_absent:
        return f"{source}, which is on the meta device; it could move once that has values"
    if source != label:
        return f"{source}, which training changes"
    if label.startswith("L['___"):
        return "a value that Python code computed in the middle of forward"
    return f"{label}, which is not part of the batch"


@dataclass(frozen=True, slots=True)
class CallFlow:
    """The data flow between calls.

    `made_bytes` and `devices` are by group: memory that the group's calls allocate and others read,
    and the device of their results if that is not the CPU.
    """

    made_bytes: Mapping[int, int]
    edges: tuple[PlannedEdge, ...]
    devices: Mapping[int, str] = field(default_factory=dict)


def recorded_extents(lowering: Lowering, inputs: Sequence[Any]) -> Extents:
    """Return the extents of all tensors of a recording, for the sizes of `inputs`."""
    values = lowering.conditions.values(lowering.conditions.sizes(inputs))
    extents: dict[str, tuple[int, int]] = {}
    for name, form in lowering.recording.forms.items():
        try:
            sizes = [evaluate(size, values) for size in form.sizes]
            strides = [evaluate(stride, values) for stride in form.strides]
        except (TypeError, ValueError):
            continue  # the size depends on the values of a tensor
        if 0 in sizes:
            count = 0
        elif strides:  # an expanded dimension repeats its bytes
            count = math.prod(s for s, stride in zip(sizes, strides, strict=True) if stride)
        else:
            count = math.prod(sizes)
        extents[name.bare] = (count * form.dtype.itemsize, form.storage)
    return extents


def recorded_devices(lowering: Lowering) -> dict[int, str]:
    """Return the device of each unit's results, by unit, where that is not the CPU."""
    return {
        lowering.unit_of[op.call_index]: str(lowering.recording.forms[name].device)
        for op in lowering.recording.ops
        for name in op.outputs
        if name in lowering.recording.forms and lowering.recording.forms[name].device.type != "cpu"
    }


def read_flow(
    graph: _C.Graph, extents: Extents, devices: Mapping[int, str] | None = None
) -> CallFlow:
    """Return the data flow between the graph's calls."""
    made_bytes, edges = graph.flow(extents)
    return CallFlow(
        made_bytes,
        tuple(PlannedEdge(source, target, size, leaf) for source, target, leaf, size in edges),
        devices or {},
    )
