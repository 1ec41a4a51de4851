# SPDX-License-Identifier: Apache-2.0
"""Run one captured graph in training.

Find its plans, and run the suffix when this is safe, otherwise the whole graph. Every call checks
whether each batch tensor is the loader's and unchanged, whether the workers sent all tensors that
the suffix needs, and whether the workers' constants are still current (`CheckedBoundary`). If any
check fails, the whole graph runs on the raw inputs, which are always available.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from penstock import _C
from penstock.compat.operators import AUTOCAST_BEGIN
from penstock.compat.storages import write_count
from penstock.cut.captured_graphs import CompiledGraph
from penstock.cut.cut_context import CutContext, UsedCut
from penstock.cut.cut_planner import CutPlanner, CutsInUse, WholeGraph
from penstock.cut.live_cut import GraphCall, LiveCut, has_layouts
from penstock.cut.whole_comparison import Side, first_difference
from penstock.errors import PenstockError
from penstock.graph.capture import Placeholder, autocast_restored, first_sentence, is_plain
from penstock.graph.constants import is_same_bits
from penstock.graph.expression import Result, holds
from penstock.graph.lowering import leaves_of
from penstock.graph.planning import BoundaryValue
from penstock.graph.sizes import REMEMBERED_MAKERS, REMEMBERED_SIZES
from penstock.graph.tolerance import with_differences
from penstock.tracking.batch_origin import BatchHandle, Provenance
from penstock.tracking.lazy_batches import LazyInputs
from penstock.tracking.lazy_tensor import LazyTensor
from penstock.tracking.lazy_value import compute_waiting
from penstock.tracking.placed_tensors import Place, placed_tensor

logger = logging.getLogger(__name__)


class CutGraph:
    """The callable that Dynamo runs in place of one captured graph.

    Confined to the training thread.
    """

    def __init__(
        self,
        context: CutContext,
        graph_module: fx.GraphModule,
        placeholders: Sequence[Placeholder],
        compiled: CompiledGraph | None = None,
    ) -> None:
        """`compiled` is the result of the user's compiler for the graph, if there is one."""
        options = context.options_of_graph()
        whole = WholeGraph(graph_module, placeholders, compiled)
        self._context = context
        self._in_use = CutsInUse(context, options, whole)
        self._planner = CutPlanner(context, options, whole, self._in_use)
        self._boundary = CheckedBoundary(context, whole, self._in_use, self._planner)
        self._run_whole = whole.run
        self._has_regions = any(node.target is AUTOCAST_BEGIN for node in graph_module.graph.nodes)
        self._placeholders = whole.placeholders
        # A batch tensor that a module keeps counts as a constant; the constant watch will detect
        # that it changes.
        self._looked_up = [
            i
            for i, p in enumerate(placeholders)
            if p.is_tensor and not p.is_parameter and p.place != "module"
        ]

    def __call__(self, *inputs: Any) -> Any:
        if not self._has_regions:
            return self._run(inputs)
        with autocast_restored():
            return self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> Any:
        if not self._context.is_open:
            return self._run_whole(*inputs)
        inputs, lazy = _split_lazy(inputs)
        try:
            call, cut = self._find(inputs, lazy)
            if call is not None and cut is not None:
                cut = self._in_use.repriced(cut, call)
            boundary = None if call is None or cut is None else self._boundary.of(cut, call)
            if boundary is None and call is not None and cut is not None:
                cut, boundary = self._former(cut, call)
        except Exception as error:
            # No part of the graph has run yet, so the whole graph still can.
            logger.debug("the cut failed", exc_info=True)
            self._context.give_up(f"the cut failed ({type(error).__name__}: {error})")
            return self._run_all(inputs, lazy)
        if call is None or cut is None:
            return self._run_all(inputs, lazy)
        self._note_use(cut, call)
        compiler = self._context.prefixes.compiler
        if boundary is not None and compiler is not None:
            compiler.examine(cut, call)
        if cut.suffix is None or boundary is None:
            results = self._run_all(inputs, lazy)
        elif cut.priced is not None and cut.priced.wants_timed_calls:
            results = self._run_timed(cut, call, boundary, inputs, lazy)
        else:
            if lazy is not None and cut.writes_inputs:
                compute_waiting(call.handle)
            call.recall(cut.raw_leaves)
            results = cut.suffix(*call.inputs, *boundary)
        for item in cut.planned.results:
            self._record(item, call, results[item.position])
        return results

    def examine(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Plan a call of the graph, and compare the workers' results, without running the graph.

        Return the inputs with all of their values.
        """
        inputs, lazy = _split_lazy(inputs)
        try:
            call, cut = self._find(inputs, lazy)
            if call is not None and cut is not None:
                self._boundary.of(cut, call, is_due=True)
        except Exception as error:
            logger.debug("the cut failed", exc_info=True)
            self._context.give_up(f"the cut failed ({type(error).__name__}: {error})")
            call = cut = None
        if call is not None and cut is not None:
            self._note_use(cut, call)
            if self._context.repricer is not None:
                self._context.repricer.skip_step()
        return inputs if lazy is None else lazy.computed()

    def _note_use(self, cut: LiveCut, call: GraphCall) -> None:
        self._context.call.plans.append(cut.plan)
        self._context.call.cuts.append(UsedCut(cut.raw_leaves, cut.keys, cut.is_settled))
        self._context.call.note_batch(call.handle)
        cut.is_used = True

    def _former(self, cut: LiveCut, call: GraphCall) -> tuple[LiveCut, list[torch.Tensor] | None]:
        """Return the former cut for a batch that has withheld leaves according to it.

        Such a batch lacks the boundary tensors of the present cut.
        """
        former = cut.former
        if former is None or not call.withheld:
            return cut, None
        boundary = self._boundary.of(former, call)
        return (cut, None) if boundary is None else (former, boundary)

    def _record(self, item: Result, call: GraphCall, result: Any) -> None:
        """Note the expression of a result, for graphs that take it as input."""
        if isinstance(result, torch.Tensor) and holds(result):
            taken = [call.inputs[index] for index in item.taken]
            inputs = tuple(
                TensorWeakRef(value) if role.kind == "leaf" else value
                for role, value in zip(item.expression.inputs, taken, strict=True)
            )
            self._context.provenance.record_result(
                result, Provenance(call.handle, item.expression, write_count(result), inputs)
            )

    def _find(
        self, inputs: Sequence[Any], lazy: LazyInputs | None
    ) -> tuple[GraphCall | None, LiveCut | None]:
        """Return the call with the inputs of a batch, and its cut, planned now if missing."""
        handle: BatchHandle | None = None
        provenance_of: dict[int, Provenance] = {}
        for index in self._looked_up:
            if lazy is not None and index in lazy.found:
                found: Provenance | None = lazy.found[index]
            else:
                found = self._context.provenance.lookup(inputs[index])
            if found is None:
                continue
            if handle is not None and found.handle is not handle:
                return None, None  # tensors of two batches at once
            handle = found.handle
            provenance_of[index] = found
        if handle is None:
            was_written = self._context.provenance.was_written
            self._context.call.has_written |= any(
                isinstance(inputs[index], torch.Tensor) and was_written(inputs[index])
                for index in self._looked_up
            )
        is_undecided = self._context.lazy.is_undecided
        self._context.call.note_inputs(
            handle is not None,
            lambda: is_undecided and self._has_unknown_input(inputs, provenance_of),
            follows_calls=lazy is not None and lazy.follows_calls,
        )
        if handle is None:
            return None, None
        call = GraphCall(handle, provenance_of, inputs)
        if lazy is not None:
            call.waiting, call.withheld = lazy.waiting, lazy.withheld
        pattern = call.pattern
        for cut in self._in_use.cuts:
            if cut.variant[0] == pattern:
                all_inputs = inputs
                if cut.added or call.waiting:
                    all_inputs = call.with_added(cut.added, cut.variant[1])
                if cut.lowering.conditions.hold(all_inputs):
                    call.inputs = all_inputs
                    return call, cut
        return call, self._planner.plan(call)

    def _has_unknown_input(self, inputs: Sequence[Any], known: Mapping[int, Provenance]) -> bool:
        """Return whether the program may have made an input from the batch before the call."""
        return any(
            index not in known
            and self._placeholders[index].place == "local"
            and is_plain(inputs[index])
            for index in self._looked_up
        )

    def _run_all(self, inputs: Sequence[Any], lazy: LazyInputs | None) -> Any:
        """Run the whole graph, which needs all values of its inputs."""
        return self._run_whole(*(inputs if lazy is None else lazy.computed()))

    def _run_timed(
        self,
        cut: LiveCut,
        call: GraphCall,
        boundary: list[torch.Tensor],
        inputs: Sequence[Any],
        lazy: LazyInputs | None,
    ) -> Any:
        """Run the one that is to be timed: the whole graph or the suffix."""
        repricer, suffix = self._context.repricer, cut.suffix
        assert repricer is not None and suffix is not None

        def run_suffix() -> Any:
            if lazy is not None and cut.writes_inputs:
                compute_waiting(call.handle)
            return suffix(*call.inputs, *boundary)

        call.recall(is_check=True)  # counts for neither of them

        return repricer.run_timed(cut, lambda: self._run_all(inputs, lazy), run_suffix)


def _split_lazy(inputs: Sequence[Any]) -> tuple[Sequence[Any], LazyInputs | None]:
    """Return the inputs of a call, and the facts about lazy tensors among them, if any."""
    if LazyTensor not in map(type, inputs):
        return inputs, None
    lazy = LazyInputs.of(inputs)
    return lazy.inputs, lazy


class CheckedBoundary:
    """The boundary tensors of one captured graph's calls, if they may replace moved results.

    Confined to the training thread. They may replace them if the workers sent all of them, the
    program did not write to them, their layout is eager's, and the constants and the process's
    numeric settings are still the workers'. A worker with kernels of another kind sends the results
    that it could compute exactly, and the rest is computed here. The first batch of each worker,
    and one in every `verify_every`, is also computed here and compared: bit for bit, or by their
    difference for calls that moved by `cut_tolerance`.
    """

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
        """Return the boundary tensors of this call, or None if the whole graph has to run.

        They are compared if `is_due`, and in the cases that the class describes.
        """
        if cut.constants is None:
            return None
        changed = cut.constants.changed(call.inputs, call.handle.epoch)
        if changed:
            self._planner.note_changed(cut, changed)
            return None
        if cut.settings != _C.kernel_settings():
            self._in_use.forget(cut)  # it is planned again under the present settings
            return None
        sizes = cut.lowering.conditions.sizes(call.inputs)
        boundary = self._shipped(cut, call, sizes)
        if boundary is None and cut.drawn is None:
            boundary = self._completed(cut, call, sizes)
        if boundary is None:
            # With draws other than the worker's, training would depend on timing.
            return None if cut.drawn is None else cut.drawn.run(call.inputs, call.handle)
        # Kernels split their work by size and by the number of threads, and each worker has one
        # thread: a new combination is compared like a first batch.
        setting = (sizes, torch.get_num_threads())
        if not is_due:
            is_due = cut.used_count == 0 or cut.unchecked_count + 1 >= self._context.verify_every
        if call.withheld and cut.unchecked_count + 1 < 2 * self._context.verify_every:
            is_due = False  # a whole batch is expected soon
        is_new = setting not in cut.verified or call.handle.maker not in cut.verified_makers
        if is_due or is_new or cut.mismatches != self._context.mismatches:
            own = self._verify(cut, call, boundary)
            if own is None:
                return None
            if self._whole.compiled is not None and not self._compare_whole(cut, call, own):
                return None
            cut.mismatches = self._context.mismatches
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
        """Return the boundary tensors that the batch carries, if it has all that are needed."""
        sent = [item.key for item in cut.planned.boundary if item.leaf is None]
        tensors = self._unwritten(call, sent)
        if tensors is None:
            return None
        boundary = self._placed(cut, call, tensors)
        return boundary if has_layouts(boundary, cut.layouts(sizes)) else None

    def _placed(
        self, cut: LiveCut, call: GraphCall, sent: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the boundary tensors where the trainer reads them, from the workers' tensors."""
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
        """Return the boundary tensors of a batch whose worker ran the exact part of the prefix."""
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
        """Return the tensors of these keys, if all have arrived and are unchanged."""
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
        """Run the moved calls on the raw inputs and compare.

        Return the boundary tensors with the trainer's bits, or None if the workers' tensors are
        wrong.
        """
        assert cut.reference is not None
        call.recall(is_check=True)
        if self._context.repricer is not None:
            self._context.repricer.skip_step()
        with torch.no_grad():
            try:
                computed = iter(cut.reference(*call.inputs))
                drawn = [] if cut.drawn is None else cut.drawn.run(call.inputs, call.handle)
            except Exception:
                return None  # the whole graph will raise it, with the user's message
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
            self._handle_mismatch(cut, call, wrong, beyond)
            return None
        cut.plan = with_differences(cut.plan, cut.planned.behind, cut.differences, tolerance)
        return [mine if item.inexact else made for item, made, mine in compared]

    def _compare_whole(self, cut: LiveCut, call: GraphCall, boundary: list[torch.Tensor]) -> bool:
        """Compare the compiled suffix with the compiled whole bit for bit.

        The suffix runs on boundary tensors that the trainer computed.
        """
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
                f"compiled by {name} without the moved calls, the model has different {difference}"
            )
        except Exception as error:
            logger.debug("the suffix cannot be compiled", exc_info=True)
            difference = first_sentence(error)
            reason = f"{name} cannot compile the remaining part ({difference})"
        if difference is None:
            return True
        self._in_use.forget(cut)
        self._planner.refuse(call, reason)
        return False

    def _handle_mismatch(
        self,
        cut: LiveCut,
        call: GraphCall,
        wrong: Sequence[BoundaryValue],
        beyond: Sequence[tuple[BoundaryValue, float]],
    ) -> None:
        """Return calls with wrong results to the trainer.

        These are the calls for which a worker gave another result, and the calls moved by the
        tolerance with a result `beyond` it. Batches in flight lack tensors that the next cut needs,
        so they are computed again.
        """
        where = f"in batch {call.handle.sequence} of epoch {call.handle.epoch}"
        units = {
            item.unit: "a worker's result of it differed from the trainer's result"
            for item in wrong
        }
        operators = sorted({item.operator for item in wrong})
        differing: list[str] = []
        if wrong:
            differing.append(
                f"the workers' result of {', '.join(operators)} differs from the trainer's result "
                f"{where} (workers run on 1 thread, the trainer on {torch.get_num_threads()})"
            )
        tolerance = self._context.options.tolerance
        for item, difference in beyond:
            assert tolerance is not None
            units.update(dict.fromkeys(item.inexact, tolerance.excess_reason(difference)))
            behind = sorted(set(item.inexact.values()))
            operators += behind
            differing.append(
                f"the workers' result of {', '.join(behind)} differs from the device's "
                f"({item.device}) by {tolerance.format(difference)} {where}; cut_tolerance allows "
                f"{tolerance}"
            )
        self._in_use.note_mismatch(cut, units)
        self._context.note_mismatch(
            operators,
            f"{'; '.join(differing)}; it runs in the trainer from now on. {cut.unchecked}",
        )
