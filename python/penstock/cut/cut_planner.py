# SPDX-License-Identifier: Apache-2.0
"""Plans cuts of one captured graph, for calls that none in use fits, and knows when not to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock import _C
from penstock.cut.cut_context import CutContext
from penstock.cut.cuts_in_use import CutsInUse
from penstock.cut.live_cut import GraphCall, LiveCut, Signature
from penstock.cut.whole_graph import WholeGraph
from penstock.graph.autocast import AutocastState, refuse_by_surroundings
from penstock.graph.capture import classify, is_plain
from penstock.graph.expression import Expression
from penstock.graph.extended_graph import extend
from penstock.graph.lowering import Lowering, lower
from penstock.graph.planning import CutOptions, plan_cut
from penstock.graph.sizes import Unlowerable

logger = logging.getLogger(__name__)

# How many plans one captured graph may have (other sizes, other uses of the batch), and how many
# refusals it remembers, before it stops trying. Each costs a calibration run.
PLANS_MAX = 8
REFUSALS_MAX = 8
# How often a constant may change before it counts as state.
CONSTANT_CHANGES_MAX = 1


class CutPlanner:
    """Confined to the training thread."""

    def __init__(
        self, context: CutContext, options: CutOptions, whole: WholeGraph, in_use: CutsInUse
    ) -> None:
        self._context = context
        self._options = options
        self._whole = whole
        self._in_use = in_use
        self._refusals = 0
        self._refused: set[Signature] = set()
        self._changes: Counter[str] = Counter()  # of constants, by label

    def plan(self, call: GraphCall) -> LiveCut | None:
        """A cut for calls like `call`, in force from now on, or None where none is made."""
        if len(self._in_use.cuts) >= PLANS_MAX or self._refusals >= REFUSALS_MAX:
            return None
        signature = self._signature(call)
        if signature in self._refused or self._in_use.is_often_unused(signature):
            return None
        self._context.call.has_planned = True
        try:
            cut = self._try_plan(call)
        except Unlowerable as refusal:
            self.refuse(call, str(refusal))
            return None
        except Exception as error:
            # Planning is no part of training: whatever goes wrong in it must not end the user's
            # run.
            logger.debug("planning failed", exc_info=True)
            self.refuse(call, f"planning failed: {type(error).__name__}: {error}")
            return None
        if self._context.repricer is not None:
            self._context.repricer.note_odd_step()
        cut.signature = signature
        return cut

    def refuse(self, call: GraphCall, reason: str) -> None:
        """Plans no cut for calls like `call` from now on."""
        self._refusals += 1
        self._refused.add(self._signature(call))
        self._context.plan.refuse(reason)

    def note_changed(self, cut: LiveCut, changed: Sequence[int]) -> None:
        """Forgets a cut of which these inputs were constants and have changed. It is planned again;
        an input that keeps changing is state."""
        for index in changed:
            label = cut.lowering.inputs[index].label
            self._changes[label] += 1
            logger.debug("constant %s changed", label)
        self._in_use.forget(cut)

    def _signature(self, call: GraphCall) -> Signature:
        own = call.inputs[: len(self._whole.placeholders)]
        return call.pattern, tuple(_form(value) for value in own)

    def _try_plan(self, call: GraphCall) -> LiveCut:
        refuse_by_surroundings()
        # Whatever waits, or stayed with a worker, is needed for the calibration.
        call.recall()
        call.inputs = call.with_added((), frozenset())
        autocast = AutocastState.now()
        leaf_index: dict[int, int] = {}
        expressions: dict[int, Expression] = {}
        for index, provenance in call.found.items():
            if isinstance(provenance.source, int):
                leaf_index[id(call.inputs[index])] = provenance.source
            elif provenance.source.autocast in (autocast, None):
                expressions[index] = provenance.source
            if not is_plain(call.inputs[index]):
                label = self._whole.placeholders[index].label
                raise Unlowerable(f"the batch tensor {label} requires grad or is not strided")
        try:
            return self._plan_with(call, leaf_index, expressions)
        except Unlowerable:
            if not expressions:
                raise
        return self._plan_with(call, leaf_index, {})

    def _plan_with(
        self, call: GraphCall, leaf_index: dict[int, int], expressions: dict[int, Expression]
    ) -> LiveCut:
        """A cut that follows its inputs by these expressions; other results of earlier graphs are
        state."""
        variant = (call.pattern, frozenset(expressions))
        changing = {label for label, count in self._changes.items() if count > CONSTANT_CHANGES_MAX}
        own = classify(
            self._whole.placeholders,
            call.inputs,
            lambda tensor: leaf_index.get(id(tensor)),
            {id(buffer): buffer for buffer in self._context.buffers()},
        )
        waiting = call.waiting.keys() & expressions.keys()
        extended = extend(self._whole.graph_module, own, expressions, waiting)
        extended.inputs = [
            replace(item, kind="state") if item.kind == "const" and item.label in changing else item
            for item in extended.inputs
        ]
        inputs = call.with_added(extended.added, frozenset())
        lowering, planned = plan_cut(
            lambda symbolic: lower(
                extended.graph_module,
                extended.inputs,
                inputs,
                symbolic=symbolic,
                given=extended.given,
                in_front=extended.in_front,
                waiting=extended.waiting,
            ),
            inputs,
            call.handle.leaf_count,
            self._context.with_link(self._options),
            self._in_use.mistrusted(variant),
        )
        if expressions and self._whole.writes_to_inputs(lowering):
            raise Unlowerable("it writes to memory that an earlier part of forward may share")
        if _gives_out_waiting(lowering):
            raise Unlowerable("it returns a tensor that the program made of the batch before")
        cut = self._in_use.make(lowering, variant, extended.added, planned, inputs)
        if self._context.repricer is not None and planned.native is not None:
            cut.priced = _C.PricedCut(planned.native, cut.suffix is not None)
        call.inputs = inputs
        self._in_use.put_in_force(cut, inputs)
        return cut


def _gives_out_waiting(lowering: Lowering) -> bool:
    """Whether a result shares memory with a value that is computed in place of an input: the
    program has that input, too, and would have other memory there."""
    forms = lowering.recording.forms
    leaves = {
        forms[name].storage
        for name, index in lowering.input_names.items()
        if lowering.inputs[index].kind == "leaf"
    }
    waiting = {forms[name].storage for name in lowering.waiting} - leaves
    return any(forms[name].storage in waiting for name in lowering.output_names)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    return value if isinstance(value, (int, float, bool)) else None
