# SPDX-License-Identifier: Apache-2.0
"""The cuts of a captured graph that are in use, and how one takes another's place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.capture import Placeholder
from penstock.compiled_models import CompiledGraph
from penstock.constants import ConstantWatch
from penstock.cut_context import CutContext
from penstock.drawn_prefix import DrawnPrefix
from penstock.known_ids import KnownIds
from penstock.lazy_inputs import LazyInputs
from penstock.lazy_value import compute_waiting
from penstock.live_cut import GraphCall, LiveCut, Variant
from penstock.lowering import Lowering
from penstock.planning import CutOptions, PlannedCut, plan_again

logger = logging.getLogger(__name__)


class ReplacesCuts:
    """What a captured graph needs to have its plans changed while it is in use. Confined to the
    training thread."""

    _context: CutContext
    _options: CutOptions
    _run_whole: Callable[..., Any]
    _placeholders: list[Placeholder]
    _cuts: list[LiveCut]
    _mistrusted: dict[Variant, dict[int, str]]
    _compiled: CompiledGraph | None  # what the user's compiler made of the whole graph

    def _repriced(self, cut: LiveCut, call: GraphCall) -> LiveCut:
        """The cut, or another for the same calls that replaces it from this batch on. Batches that
        are under way lack what the other needs of them; the whole graph runs on these."""
        repricer = self._context.repricer
        if repricer is None:
            return cut
        change = repricer.look_at(cut, self._context.call_weight)
        if change is None:
            return cut
        repricer.note_odd_step()
        native = cut.planned.native
        if isinstance(change, LiveCut):
            other = change
        else:
            assert native is not None
            # What waits is as good as any other input here.
            inputs = call.with_added((), frozenset())
            try:
                planned = plan_again(
                    cut.lowering,
                    inputs,
                    call.handle.leaf_count,
                    self._options,
                    self._mistrusted.get(cut.variant, {}).keys(),
                    change,
                    native.calibration,
                )
            except Exception:
                logger.debug("the plan cannot be changed", exc_info=True)
                repricer.give_up(cut)
                return cut
            other = self._live(cut.lowering, cut.variant, cut.added, planned, inputs)
            other.pricing = cut.pricing
            other.signature = cut.signature
        self._put_in_force(other, call.inputs)
        self.forget(cut)
        where = f"batch {call.handle.sequence} of epoch {call.handle.epoch}"
        repricer.changed(cut, other, where)
        return other

    def _run_all(self, inputs: Sequence[Any], lazy: LazyInputs | None) -> Any:
        """Runs the whole graph, which needs all values of its own inputs."""
        return self._run_whole(*(inputs if lazy is None else lazy.computed()))

    def _run_spot(
        self,
        cut: LiveCut,
        call: GraphCall,
        boundary: list[torch.Tensor],
        inputs: Sequence[Any],
        lazy: LazyInputs | None,
    ) -> Any:
        """Runs the whole graph or the suffix, whichever is to be timed."""
        repricer, suffix = self._context.repricer, cut.suffix
        assert repricer is not None and suffix is not None

        def run_suffix() -> Any:
            if lazy is not None and cut.writes_inputs:
                compute_waiting(call.handle)
            return suffix(*call.inputs, *boundary)

        return repricer.run_spot(cut, lambda: self._run_all(inputs, lazy), run_suffix)

    def _live(
        self,
        lowering: Lowering,
        variant: Variant,
        added: list[tuple[int, int]],
        planned: PlannedCut,
        inputs: Sequence[Any],
    ) -> LiveCut:
        cut = LiveCut(
            lowering,
            variant,
            added,
            planned,
            writes_inputs=self._writes_to_inputs(lowering),
            mistrusts=self._context.mistrusts,
        )
        if planned.boundary:
            assert planned.suffix is not None and planned.reference is not None
            cut.suffix = (
                planned.suffix.forward
                if self._compiled is None
                else self._compiled.compile_suffix(planned.suffix)
            )
            cut.reference = planned.reference.forward
            cut.constants = ConstantWatch({i: inputs[i] for i in planned.constant_inputs})
            if any(item.is_random for item in planned.boundary):
                cut.drawn = DrawnPrefix.of(
                    lowering, planned.prefix, planned.prefix_constants, planned.seed
                )
        return cut

    def _writes_to_inputs(self, lowering: Lowering) -> bool:
        """Whether something is written that may lie in the memory of another input, made before
        this graph: what that has come to is not known here."""
        recording = lowering.recording
        written = recording.mutated_storages
        made_before = (*lowering.given, *lowering.waiting)
        return any(recording.forms[name].storage in written for name in made_before) or any(
            recording.forms[name].storage in written
            and index < len(self._placeholders)
            and self._placeholders[index].place == "local"
            for name, index in lowering.input_names.items()
        )

    def _put_in_force(self, cut: LiveCut, inputs: Sequence[Any]) -> None:
        """Makes a cut one of those in use."""
        if cut.suffix is not None:
            self._context.install(cut.planned)
        self._cuts.append(cut)
        self._context.known_ids.append(KnownIds.of(cut.lowering, cut.planned, inputs))

    @property
    def cuts(self) -> Sequence[LiveCut]:
        return self._cuts

    def forget(self, cut: LiveCut) -> None:
        """Stops using a cut, and has its prefix withdrawn unless another cut has the same."""
        self._cuts.remove(cut)
        self._context.withdraw(cut.planned)
