# SPDX-License-Identifier: Apache-2.0
"""The boundary tensors of a call, where they may stand for the results of moved calls.

They may if the workers sent all of them, nobody wrote to them, their layout is that of eager, and
the constants and the process's numeric settings are still those that the workers have. A worker
whose kernels are of another kind sends what it could compute exactly, and the rest is computed
here. The first batch of each worker, and one in every `verify_every`, is also computed here and
compared: bit for bit, or by their difference where calls moved by `cut_tolerance`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from penstock import _C
from penstock.cut.cut_context import CutContext
from penstock.cut.cut_planner import CutPlanner
from penstock.cut.cuts_in_use import CutsInUse
from penstock.cut.live_cut import GraphCall, LiveCut, has_layouts
from penstock.cut.whole_comparison import Side, first_difference
from penstock.cut.whole_graph import WholeGraph
from penstock.errors import PenstockError
from penstock.graph.capture import first_sentence
from penstock.graph.constants import is_same_bits
from penstock.graph.planning import BoundaryValue
from penstock.graph.prefix_inputs import leaves_of
from penstock.graph.sizes import REMEMBERED_MAKERS, REMEMBERED_SIZES
from penstock.graph.tolerance import with_differences
from penstock.seams.storages import write_count
from penstock.tracking.placed_tensors import Place, placed_tensor

logger = logging.getLogger(__name__)


class CheckedBoundary:
    """The checks of one captured graph. Confined to the training thread."""

    def __init__(
        self, context: CutContext, whole: WholeGraph, in_use: CutsInUse, planner: CutPlanner
    ) -> None:
        self._context = context
        self._whole = whole
        self._in_use = in_use
        self._planner = planner
        self._versions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # when first used

    def of(
        self, cut: LiveCut, call: GraphCall, *, is_due: bool = False
    ) -> list[torch.Tensor] | None:
        """The boundary tensors of this call, or None when the whole graph has to run. They are
        compared if `is_due`, and as the module's text says."""
        if cut.constants is None:
            return None
        changed = cut.constants.changed(call.inputs, call.handle.epoch)
        if changed:
            self._planner.note_changed(cut, changed)
            return None
        if cut.settings != _C.kernel_settings():
            self._in_use.forget(cut)  # and planned again under the present ones
            return None
        sizes = cut.lowering.conditions.sizes(call.inputs)
        boundary = self._shipped(cut, call, sizes)
        if boundary is None and cut.drawn is None:
            boundary = self._completed(cut, call, sizes)
        if boundary is None:
            # Another draw than a worker's would be another training, at a moment of the clock's.
            return None if cut.drawn is None else cut.drawn.run(call.inputs, call.handle)
        # Kernels split their work by size and by the number of threads, and the workers have one
        # thread each: a combination that is new here is compared like a first batch.
        setting = (sizes, torch.get_num_threads())
        if not is_due:
            is_due = cut.used_count == 0 or cut.unchecked_count + 1 >= self._context.verify_every
        if call.withheld and cut.unchecked_count + 1 < 2 * self._context.verify_every:
            is_due = False  # a batch that came whole is about to
        is_new = setting not in cut.verified or call.handle.maker not in cut.verified_makers
        if is_due or is_new or cut.mistrusts != self._context.mistrusts:
            own = self._verify(cut, call, boundary)
            if own is None:
                return None
            if self._whole.compiled is not None and not self._compare_whole(cut, call, own):
                return None
            cut.mistrusts = self._context.mistrusts
            cut.unchecked.clear()
            cut.unchecked_count = 0
            if len(cut.verified) < REMEMBERED_SIZES:
                cut.verified.add(setting)
            if len(cut.verified_makers) >= REMEMBERED_MAKERS:
                cut.verified_makers.clear()
            cut.verified_makers.add(call.handle.maker)
        else:
            cut.unchecked.add(call.handle.epoch, call.handle.sequence)
            cut.unchecked_count += 1
        cut.used_count += 1
        return boundary

    def _shipped(
        self, cut: LiveCut, call: GraphCall, sizes: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        """The boundary tensors that came with the batch, if all that are needed have."""
        sent = [item.key for item in cut.planned.boundary if item.leaf is None]
        tensors = self._unwritten(call, sent)
        if tensors is None:
            return None
        boundary = self._placed(cut, call, tensors)
        return boundary if has_layouts(boundary, cut.layouts(sizes)) else None

    def _placed(
        self, cut: LiveCut, call: GraphCall, sent: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The boundary tensors where the trainer reads them, from those that workers have sent."""
        if any(item.leaf is not None for item in cut.planned.boundary):
            call.recall()
        come = iter(sent)
        placements = self._context.provenance.placements
        placed: list[torch.Tensor] = []
        place: Place
        for item in cut.planned.boundary:
            if item.leaf is None:
                tensor, place = next(come), item.key
            else:
                tensor, place = call.inputs[item.leaf], cut.lowering.inputs[item.leaf].leaf_index
            placed.append(placed_tensor(tensor, item.device, call.handle, placements, place))
        return placed

    def _completed(
        self, cut: LiveCut, call: GraphCall, sizes: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        """The boundary tensors of a batch whose worker has run the exact part of the prefix."""
        if not call.handle.boundary or cut.rest is None:
            return None
        given = self._unwritten(call, cut.rest.keys)
        if given is None:
            return None
        call.recall()
        try:
            leaves = leaves_of(cut.lowering, call.inputs, call.handle.leaf_count)
            boundary = self._placed(cut, call, cut.rest.run(leaves, given))
        except PenstockError:
            logger.debug("the exact part cannot be completed", exc_info=True)
            return None
        return boundary if has_layouts(boundary, cut.layouts(sizes)) else None

    def _unwritten(self, call: GraphCall, keys: Sequence[str]) -> list[torch.Tensor] | None:
        """The tensors of these keys, if all have come and are as they came."""
        shipped = call.handle.boundary
        if any(key not in shipped for key in keys):
            return None
        tensors = [shipped[key] for key in keys]
        for tensor in tensors:
            # A program that writes to a result of the model may have written to a boundary tensor.
            first = self._versions.setdefault(tensor, write_count(tensor))
            if first != write_count(tensor):
                return None
        return tensors

    def _verify(
        self, cut: LiveCut, call: GraphCall, boundary: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Runs the moved calls on the raw inputs and compares. Returns the boundary tensors to the
        trainer's own bits, or None where the workers' are not as they should be."""
        assert cut.reference is not None
        call.recall(is_check=True)
        if self._context.repricer is not None:
            self._context.repricer.note_odd_step()
        with torch.no_grad():
            try:
                computed = iter(cut.reference(*call.inputs))
                drawn = [] if cut.drawn is None else cut.drawn.run(call.inputs, call.handle)
            except Exception:
                return None  # the whole graph will say the same, in the user's own words
        own = [
            drawn[index] if item.is_random else next(computed)
            for index, item in enumerate(cut.planned.boundary)
        ]
        compared = list(zip(cut.planned.boundary, boundary, own, strict=True))
        wrong = [
            item for item, made, mine in compared if not (item.inexact or is_same_bits(made, mine))
        ]
        tolerance = self._context.options.tolerance
        beyond: list[tuple[BoundaryValue, float]] = []
        for index, (item, made, mine) in enumerate(compared):
            if not item.inexact:
                continue
            assert tolerance is not None
            difference = tolerance.difference(made, mine)
            cut.differences[index] = max(cut.differences[index], difference)
            if difference > tolerance.largest:
                beyond.append((item, difference))
        if wrong or beyond:
            self._mistrust(cut, call, wrong, beyond)
            return None
        cut.plan = with_differences(cut.plan, cut.planned.behind, cut.differences, tolerance)
        return [mine if item.inexact else made for item, made, mine in compared]

    def _compare_whole(self, cut: LiveCut, call: GraphCall, boundary: list[torch.Tensor]) -> bool:
        """Runs the compiled suffix, on boundary tensors of the trainer's own, and the compiled
        whole and compares bit for bit."""
        assert cut.suffix is not None and self._whole.compiled is not None
        run_whole, suffix, count = self._whole.run, cut.suffix, len(self._whole.placeholders)
        name = self._whole.compiled.user.backend_name
        try:
            difference = first_difference(
                Side(lambda copies: run_whole(*copies[:count])),
                Side(lambda copies: suffix(*copies, *boundary)),
                call.inputs,
            )
            reason = (
                f"compiled by {name} without the calls that move, the model has other {difference}"
            )
        except Exception as error:
            logger.debug("the suffix cannot be compiled", exc_info=True)
            difference = first_sentence(error)
            reason = f"{name} cannot compile the part that stays ({difference})"
        if difference is None:
            return True
        self._in_use.forget(cut)
        self._planner.refuse(call, reason)
        return False

    def _mistrust(
        self,
        cut: LiveCut,
        call: GraphCall,
        wrong: Sequence[BoundaryValue],
        beyond: Sequence[tuple[BoundaryValue, float]],
    ) -> None:
        """Takes back into the trainer the calls for which a worker gave another result, and those
        that moved by the tolerance and gave one `beyond` it. Batches that are under way lack
        tensors that the next cut needs, so they are computed anew."""
        where = f"in batch {call.handle.sequence} of epoch {call.handle.epoch}"
        units = {item.unit: "a worker's result of it was not the trainer's own" for item in wrong}
        operators = sorted({item.operator for item in wrong})
        said: list[str] = []
        if wrong:
            said.append(
                f"the workers' result of {', '.join(operators)} differs from the trainer's own "
                f"{where} (workers run on 1 thread, the trainer on {torch.get_num_threads()})"
            )
        tolerance = self._context.options.tolerance
        for item, difference in beyond:
            assert tolerance is not None
            units.update(dict.fromkeys(item.inexact, tolerance.why_beyond(difference)))
            behind = sorted(set(item.inexact.values()))
            operators += behind
            said.append(
                f"the workers' result of {', '.join(behind)} differs from that on {item.device} by "
                f"{tolerance.spoken(difference)} {where}, and cut_tolerance allows {tolerance}"
            )
        self._in_use.mistrust(cut, units)
        self._context.mistrust(
            operators,
            f"{'; '.join(said)}; it runs in the trainer from here on. {cut.unchecked}",
        )
