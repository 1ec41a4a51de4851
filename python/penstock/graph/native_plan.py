# SPDX-License-Identifier: Apache-2.0
"""Asks the native part for plans, and puts them in the words of the façade."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock import _C
from penstock.graph.call_flow import CallFlow
from penstock.graph.lowering import Lowering
from penstock.graph.plan import CutTotals, Plan, PlannedCall, RunningPrice
from penstock.graph.recording import Name
from penstock.seams.trees import tree_leaves

MODULE_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
MEMBER_PATH = re.compile(
    r"L\['\w+'\](?:\.__self__)?(?:\._(?:modules|parameters|buffers)\['[^']+'\])+"
)
NO_STORAGE = 2**32 - 1  # of a value that is no tensor, or was not measured
FOLDERS = re.compile(r" at \S*/")  # TorchScript names a line's file with its folders


@dataclass(frozen=True)
class NativePlans:
    """The plan that was asked for, and those that it is held against, by one calibration."""

    chosen: Any
    none: Any
    maximal: Any
    calibration: Any
    verdicts: Sequence[Any]  # by node
    graph: Any
    prices: _C.Prices

    def seconds(self, plan: Any, prices: _C.Prices) -> _C.StageSeconds:
        """The seconds of one of them by other prices."""
        return _C.plan_seconds(self.graph, self.verdicts, self.calibration, plan, prices)

    def step(self, plan: Any, prices: _C.Prices) -> RunningPrice:
        """How long a step takes with one of them, beside loads that are known."""
        trainer_s, worker_s, step_s = prices.step_of(self.seconds(plan, prices))
        return RunningPrice(
            times=0,
            changes=0,
            trainer_s=trainer_s,
            worker_s=worker_s,
            worker_count=int(prices.worker_count),
            step_s=step_s,
            is_held=False,
        )

    def chosen_by(self, prices: _C.Prices) -> Any:
        """The plan that is chosen by other prices."""
        return _choose(self.graph, self.verdicts, self.calibration, "auto", prices)


def _choose(graph: Any, verdicts: Any, calibration: Any, cut: str, prices: _C.Prices) -> Any:
    return _C.make_plan(graph, verdicts, calibration, cut=cut, prices=prices)


def make_plans(
    graph: Any,
    leaves: list[torch.Tensor],
    held: Sequence[torch.Tensor | None],
    *,
    mode: str,
    allow_random: bool,
    prices: _C.Prices,
    calibration: Any = None,
) -> NativePlans:
    """Times and prices a graph; runs what can move on `leaves`, unless there is a `calibration` of
    this very graph."""
    verdicts = _C.analyse_effects(graph, allow_random=allow_random)
    if calibration is None:
        calibration = _C.calibrate(graph, verdicts, leaves, list(held))
    chosen, none, maximal = (
        _choose(graph, verdicts, calibration, cut, prices) for cut in (mode, "none", "maximal")
    )
    return NativePlans(chosen, none, maximal, calibration, verdicts, graph, prices)


def read_plan(
    plans: NativePlans,
    flow: CallFlow,
    reasons: Mapping[int, str] | None = None,
    hidden: Set[int] = frozenset(),
) -> Plan:
    """The native plan without the `hidden` units, in the words of the façade."""
    reasons = reasons or {}
    native = plans.chosen
    return Plan(
        moved=tuple(
            _call(group, "worker", flow) for group in native.moved if group.group not in hidden
        ),
        kept=tuple(
            _call(
                group,
                "both" if group.replicated else "trainer",
                flow,
                None if group.level != "STATE" else reasons.get(group.group),
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
        ),
        edges=tuple(
            replace(edge, source=None) if edge.source in hidden else edge
            for edge in flow.edges
            if edge.target not in hidden
        ),
    )


def _totals(native: Any) -> tuple[float, float, int]:
    return native.worker_s, native.trainer_s, native.boundary_bytes


def _call(group: Any, place: str, flow: CallFlow, reason: str | None = None) -> PlannedCall:
    return PlannedCall(
        index=group.group,
        operator=spoken(group.label) or ", ".join(group.operators),
        place=place,
        reason=reason or spoken(group.reason),
        worker_s=group.worker_s,
        trainer_s=group.trainer_s,
        made_bytes=flow.made_bytes.get(group.group, 0),
    )


def spoken(text: str) -> str:
    """A native sentence with members and lines as a person would name them."""
    return MEMBER_PATH.sub(lambda m: spoken_source(m[0]), FOLDERS.sub(" at ", text))


def state_reasons(lowering: Lowering) -> dict[int, str]:
    """By unit, why a call stays, or the parameter or state that it reads: for people it says more
    than the operators that the call is made of."""
    pins = lowering.recording.pins
    reasons = {lowering.unit_of[call_index]: reason for call_index, reason in pins.items()}
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
                reasons.setdefault(unit, f"it reads {_spoken_state(label)}")
    return reasons


def _spoken_state(label: str) -> str:
    source = spoken_source(label)
    if source != label:
        return f"{source}, which training changes"
    if label.startswith("L['___"):
        return "what Python made of a value in the middle of forward"
    return f"{label}, which is not the batch's own"


def spoken_source(label: str) -> str:
    """`net.0.weight` for `L['self']._modules['net']._modules['0']._parameters['weight']`."""
    members = MODULE_MEMBER.findall(label)
    return ".".join(members) if MEMBER_PATH.fullmatch(label) else label
