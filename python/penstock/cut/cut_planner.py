# SPDX-License-Identifier: Apache-2.0
"""Plan the cuts of one captured graph, keep the ones in use, and decide when to plan none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from penstock import _C
from penstock.cut.captured_graphs import CompiledGraph
from penstock.cut.cut_context import CutContext
from penstock.cut.installed_prefixes import FORGOTTEN_MAX
from penstock.cut.live_cut import DrawnPrefix, GraphCall, KnownIds, LiveCut, Signature, Variant
from penstock.graph.capture import (
    AutocastState,
    Placeholder,
    classify,
    is_plain,
    refuse_by_surroundings,
)
from penstock.graph.constants import ConstantWatch
from penstock.graph.expression import Expression, extend
from penstock.graph.lowering import Lowering, lower
from penstock.graph.planning import CutOptions, PlannedCut, plan_again, plan_cut
from penstock.graph.sizes import Unlowerable

logger = logging.getLogger(__name__)

# Limits of the plans of one captured graph (other sizes, other uses of the batch), and of its
# refusals, before planning stops. Each costs a calibration run.
PLANS_MAX = 8
REFUSALS_MAX = 8
# How often a constant may change before it counts as state.
CONSTANT_CHANGES_MAX = 1


class CutPlanner:
    """Plans cuts of one captured graph, for calls that none in use fits.

    Confined to the training thread.
    """

    def __init__(
        self, context: CutContext, options: CutOptions, whole: WholeGraph, in_use: CutsInUse
    ) -> None:
        self._context = context
        self._options = options
        self._whole = whole
        self._in_use = in_use
        self._refusals = 0
        self._refused: set[Signature] = set()
        self._changes: Counter[str] = Counter()  # changes of constants, by label

    def plan(self, call: GraphCall) -> LiveCut | None:
        """Return a cut for calls like `call`, in force from now on, or None if none is made."""
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
            # Planning is not part of training: its errors must not end the user's run.
            logger.debug("planning failed", exc_info=True)
            self.refuse(call, f"planning failed: {type(error).__name__}: {error}")
            return None
        if self._context.repricer is not None:
            self._context.repricer.skip_step()
        cut.signature = signature
        return cut

    def refuse(self, call: GraphCall, reason: str) -> None:
        """Plan no cut for calls like `call` from now on."""
        self._refusals += 1
        self._refused.add(self._signature(call))
        self._context.plan.refuse(reason)

    def note_changed(self, cut: LiveCut, changed: Sequence[int]) -> None:
        """Forget a cut because these inputs, which it treats as constants, have changed.

        It is planned again; an input that keeps changing is state.
        """
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
        # The calibration needs lazy values and leaves that stayed with a worker.
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
        """Plan a cut that derives its inputs by these expressions.

        Other results of earlier graphs are state.
        """
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
            self._in_use.mismatched(variant),
        )
        if expressions and self._whole.writes_to_inputs(lowering):
            raise Unlowerable("it writes to memory that an earlier part of forward may share")
        if _returns_deferred_memory(lowering):
            raise Unlowerable(
                "it returns a tensor that the program computed from the batch earlier"
            )
        cut = self._in_use.make(lowering, variant, extended.added, planned, inputs)
        if self._context.repricer is not None and planned.native is not None:
            cut.priced = _C.PricedCut(planned.native, cut.suffix is not None)
        call.inputs = inputs
        self._in_use.activate(cut, inputs)
        return cut


def _returns_deferred_memory(lowering: Lowering) -> bool:
    """Return whether a result shares memory with a value that is computed in place of an input.

    The program also has that input, and would have other memory there.
    """
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


class CutsInUse:
    """The cuts in use of one captured graph. Confined to the training thread."""

    def __init__(self, context: CutContext, options: CutOptions, whole: WholeGraph) -> None:
        self.cuts: list[LiveCut] = []
        self._context = context
        self._options = options
        self._whole = whole
        self._mismatched: dict[Variant, dict[int, str]] = {}  # units that stay, with the reasons
        self._forgotten: Counter[Signature] = Counter()  # cuts that were not used, by call
        context.prefixes.add_graph(self)

    def make(
        self,
        lowering: Lowering,
        variant: Variant,
        added: list[tuple[int, int]],
        planned: PlannedCut,
        inputs: Sequence[Any],
    ) -> LiveCut:
        """Make a cut that was planned, with all that it runs; it is not in force yet."""
        cut = LiveCut(
            lowering,
            variant,
            added,
            planned,
            writes_inputs=self._whole.writes_to_inputs(lowering),
            mismatches=self._context.mismatches,
        )
        if planned.boundary:
            assert planned.suffix is not None and planned.reference is not None
            cut.suffix = self._whole.run_of_suffix(planned.suffix)
            cut.reference = planned.reference.forward
            cut.constants = ConstantWatch({i: inputs[i] for i in planned.constant_inputs})
            if any(item.is_random for item in planned.boundary):
                cut.drawn = DrawnPrefix.of(
                    lowering, planned.prefix, planned.prefix_constants, planned.seed
                )
        return cut

    def activate(self, cut: LiveCut, inputs: Sequence[Any]) -> None:
        """Add a cut to the cuts in use."""
        if cut.suffix is not None:
            self._context.prefixes.install(cut.planned)
            self._note_change()
        self.cuts.append(cut)
        self._context.prefixes.known_ids.append(KnownIds.of(cut.lowering, cut.planned, inputs))

    def repriced(self, cut: LiveCut, call: GraphCall) -> LiveCut:
        """Return the cut, or another for the same calls that replaces it from this batch on.

        Batches in flight lack tensors that the other cut needs; the whole graph runs on these.
        """
        repricer = self._context.repricer
        if repricer is None:
            return cut
        change = repricer.examine(cut, self._context.call_weight)
        if change is None:
            return cut
        repricer.skip_step()
        native = cut.planned.native
        if isinstance(change, LiveCut):
            other = change
        else:
            assert native is not None
            # Here, a lazy value is equivalent to any other input.
            call.recall(is_check=True)
            inputs = call.with_added((), frozenset())
            try:
                planned = plan_again(
                    cut.lowering,
                    inputs,
                    call.handle.leaf_count,
                    self._options,
                    self.mismatched(cut.variant).keys(),
                    change,
                    native.calibration,
                )
            except Exception:
                logger.debug("the plan cannot be changed", exc_info=True)
                repricer.give_up(cut)
                return cut
            other = self.make(cut.lowering, cut.variant, cut.added, planned, inputs)
            assert planned.native is not None
            has_suffix = other.suffix is not None
            other.priced = _C.PricedCut(planned.native, has_suffix, like=cut.priced)
            other.signature = cut.signature
        self.activate(other, call.inputs)
        self.forget(cut)
        cut.former = None
        other.former = cut if cut.suffix is not None else None
        where = f"batch {call.handle.sequence} of epoch {call.handle.epoch}"
        repricer.changed(cut, other, where)
        return other

    def _note_change(self) -> None:
        if self._context.withholding is not None:
            self._context.withholding.send_whole()

    def mismatched(self, variant: Variant) -> Mapping[int, str]:
        """Return the units that stay in such cuts because a worker was wrong, with the reasons."""
        return self._mismatched.get(variant, {})

    def note_mismatch(self, cut: LiveCut, units: Mapping[int, str]) -> None:
        """Stop using a cut for which a worker sent other results.

        The next one leaves these units to the trainer, for these reasons.
        """
        self._mismatched.setdefault(cut.variant, {}).update(units)
        self.forget(cut)

    def forget(self, cut: LiveCut) -> None:
        """Stop using a cut, and withdraw its prefix unless another cut has the same."""
        self.cuts.remove(cut)
        self._context.prefixes.withdraw(cut.planned)
        self._note_change()

    def forget_unused(self, cut: LiveCut) -> None:
        logger.debug("a plan is dropped because it was unused for too long")
        self._forgotten[cut.signature] += 1
        self.forget(cut)

    def is_often_unused(self, signature: Signature) -> bool:
        """Return whether cuts for such calls were forgotten too often to plan another."""
        return self._forgotten[signature] > FORGOTTEN_MAX


class WholeGraph:
    """One captured graph as Dynamo or the user's compiler produced it.

    It runs when no cut can. Confined to the training thread.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        placeholders: Sequence[Placeholder],
        compiled: CompiledGraph | None,
    ) -> None:
        """`compiled` is the result of the user's compiler for the graph, if there is one."""
        self.graph_module = graph_module
        self.placeholders = list(placeholders)
        self.compiled = compiled
        self.run: Callable[..., Any] = (
            graph_module.forward if compiled is None else compiled.run_whole
        )

    def run_of_suffix(self, suffix: fx.GraphModule) -> Callable[..., Any]:
        """Return the suffix as run by the runner of the whole graph."""
        return suffix.forward if self.compiled is None else self.compiled.compile_suffix(suffix)

    def writes_to_inputs(self, lowering: Lowering) -> bool:
        """Return whether a write may change the memory of an input made before this graph.

        The value of that input is unknown here.
        """
        recording = lowering.recording
        written = recording.mutated_storages
        made_before = (*lowering.given, *lowering.waiting)
        return any(recording.forms[name].storage in written for name in made_before) or any(
            recording.forms[name].storage in written
            and index < len(self.placeholders)
            and self.placeholders[index].place == "local"
            for name, index in lowering.input_names.items()
        )
