# SPDX-License-Identifier: Apache-2.0
"""The cuts of a captured graph that are in use, and how one takes another's place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock import _C
from penstock.cut.cut_context import CutContext
from penstock.cut.drawn_prefix import DrawnPrefix
from penstock.cut.known_ids import KnownIds
from penstock.cut.live_cut import GraphCall, LiveCut, Signature, Variant
from penstock.cut.unused_cuts import FORGOTTEN_MAX
from penstock.cut.whole_graph import WholeGraph
from penstock.graph.constants import ConstantWatch
from penstock.graph.lowering import Lowering
from penstock.graph.planning import CutOptions, PlannedCut, plan_again

logger = logging.getLogger(__name__)


class CutsInUse:
    """The cuts in use of one captured graph. Confined to the training thread."""

    def __init__(self, context: CutContext, options: CutOptions, whole: WholeGraph) -> None:
        self.cuts: list[LiveCut] = []
        self._context = context
        self._options = options
        self._whole = whole
        self._mistrusted: dict[Variant, dict[int, str]] = {}  # units that stay, and why
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
        """A cut that was planned, with all that it runs, and not in force yet."""
        cut = LiveCut(
            lowering,
            variant,
            added,
            planned,
            writes_inputs=self._whole.writes_to_inputs(lowering),
            mistrusts=self._context.mistrusts,
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

    def put_in_force(self, cut: LiveCut, inputs: Sequence[Any]) -> None:
        """Makes a cut one of those in use."""
        if cut.suffix is not None:
            self._context.prefixes.install(cut.planned)
            self._note_change()
        self.cuts.append(cut)
        self._context.prefixes.known_ids.append(KnownIds.of(cut.lowering, cut.planned, inputs))

    def repriced(self, cut: LiveCut, call: GraphCall) -> LiveCut:
        """The cut, or another for the same calls that replaces it from this batch on. Batches that
        are under way lack tensors that the other needs; the whole graph runs on these."""
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
            # A value that waits is as good as any other input here.
            call.recall(is_check=True)
            inputs = call.with_added((), frozenset())
            try:
                planned = plan_again(
                    cut.lowering,
                    inputs,
                    call.handle.leaf_count,
                    self._options,
                    self.mistrusted(cut.variant).keys(),
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
        self.put_in_force(other, call.inputs)
        self.forget(cut)
        cut.former = None
        other.former = cut if cut.suffix is not None else None
        where = f"batch {call.handle.sequence} of epoch {call.handle.epoch}"
        repricer.changed(cut, other, where)
        return other

    def _note_change(self) -> None:
        if self._context.withholding is not None:
            self._context.withholding.send_whole()

    def mistrusted(self, variant: Variant) -> Mapping[int, str]:
        """The units that stay in cuts of that kind since a worker was wrong about them, and why."""
        return self._mistrusted.get(variant, {})

    def mistrust(self, cut: LiveCut, units: Mapping[int, str]) -> None:
        """Stops using a cut of which a worker made something else. The next one leaves these
        units to the trainer, for these reasons."""
        self._mistrusted.setdefault(cut.variant, {}).update(units)
        self.forget(cut)

    def forget(self, cut: LiveCut) -> None:
        """Stops using a cut, and has its prefix withdrawn unless another cut has the same."""
        self.cuts.remove(cut)
        self._context.prefixes.withdraw(cut.planned)
        self._note_change()

    def forget_unused(self, cut: LiveCut) -> None:
        logger.debug("a plan was not used for long")
        self._forgotten[cut.signature] += 1
        self.forget(cut)

    def is_often_unused(self, signature: Signature) -> bool:
        """Whether cuts for such calls were forgotten too often to plan another."""
        return self._forgotten[signature] > FORGOTTEN_MAX
