# SPDX-License-Identifier: Apache-2.0
"""One captured graph in training: finds its plans, runs the suffix when it safely can, else the
whole graph.

Every call asks again whether each batch tensor is the loader's own, untouched, whether the workers
sent all that the suffix needs, and whether the constants are still those that the workers have. Any
doubt runs the whole graph on the raw inputs, which are always there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.weak import TensorWeakRef

from penstock.cut.checked_boundary import CheckedBoundary
from penstock.cut.compiled_models import CompiledGraph
from penstock.cut.cut_context import CutContext
from penstock.cut.cut_planner import CutPlanner
from penstock.cut.cuts_in_use import CutsInUse
from penstock.cut.live_cut import GraphCall, LiveCut
from penstock.cut.model_call import UsedCut
from penstock.cut.whole_graph import WholeGraph
from penstock.graph.autocast import autocast_put_back
from penstock.graph.capture import Placeholder, is_plain
from penstock.graph.expression import Result, holds
from penstock.seams.operators import AUTOCAST_BEGIN
from penstock.seams.storages import write_count
from penstock.tracking.batch_origin import BatchHandle, Provenance
from penstock.tracking.lazy_inputs import LazyInputs
from penstock.tracking.lazy_tensor import LazyTensor
from penstock.tracking.lazy_value import compute_waiting

logger = logging.getLogger(__name__)


class CutGraph:
    """The callable that Dynamo runs in place of one captured graph. Confined to the training
    thread."""

    def __init__(
        self,
        context: CutContext,
        graph_module: fx.GraphModule,
        placeholders: Sequence[Placeholder],
        compiled: CompiledGraph | None = None,
    ) -> None:
        """`compiled` is the result of the user's compiler for the graph, where there is one."""
        options = context.options_of_graph()
        whole = WholeGraph(graph_module, placeholders, compiled)
        self._context = context
        self._in_use = CutsInUse(context, options, whole)
        self._planner = CutPlanner(context, options, whole, self._in_use)
        self._boundary = CheckedBoundary(context, whole, self._in_use, self._planner)
        self._run_whole = whole.run
        self._has_regions = any(node.target is AUTOCAST_BEGIN for node in graph_module.graph.nodes)
        self._placeholders = whole.placeholders
        # A batch's tensor that a module keeps counts as a constant, which will be seen to change.
        self._looked_up = [
            i
            for i, p in enumerate(placeholders)
            if p.is_tensor and not p.is_parameter and p.place != "module"
        ]

    def __call__(self, *inputs: Any) -> Any:
        if not self._has_regions:
            return self._run(inputs)
        with autocast_put_back():
            return self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> Any:
        if not self._context.is_open:
            return self._run_whole(*inputs)
        inputs, lazy = _taken_apart(inputs)
        try:
            call, cut = self._find(inputs, lazy)
            if call is not None and cut is not None:
                cut = self._in_use.repriced(cut, call)
            boundary = None if call is None or cut is None else self._boundary.of(cut, call)
            if boundary is None and call is not None and cut is not None:
                cut, boundary = self._former(cut, call)
        except Exception as error:
            # Nothing of the graph has run yet, so the whole of it still can.
            logger.debug("the cut failed", exc_info=True)
            self._context.give_up(f"the cut failed ({type(error).__name__}: {error})")
            return self._run_all(inputs, lazy)
        if call is None or cut is None:
            return self._run_all(inputs, lazy)
        self._note_use(cut, call)
        compiler = self._context.prefixes.compiler
        if boundary is not None and compiler is not None:
            compiler.look_at(cut, call)
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

    def look_at(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Plans for a call of the graph, and compares the workers' results, without running it.
        Returns the inputs with all of their values."""
        inputs, lazy = _taken_apart(inputs)
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
                self._context.repricer.note_odd_step()
        return inputs if lazy is None else lazy.computed()

    def _note_use(self, cut: LiveCut, call: GraphCall) -> None:
        self._context.call.plans.append(cut.plan)
        self._context.call.cuts.append(UsedCut(cut.raw_leaves, cut.keys, cut.is_settled))
        self._context.call.note_batch(call.handle)
        cut.is_used = True

    def _former(self, cut: LiveCut, call: GraphCall) -> tuple[LiveCut, list[torch.Tensor] | None]:
        """The cut that was in force before, for a batch that lacks the boundary tensors of the
        present one and has left leaves behind for those of the former."""
        former = cut.former
        if former is None or not call.withheld:
            return cut, None
        boundary = self._boundary.of(former, call)
        return (cut, None) if boundary is None else (former, boundary)

    def _record(self, item: Result, call: GraphCall, result: Any) -> None:
        """Notes the expression of a result, for the graph that it may be given to."""
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
        """The inputs that are of a batch, and the cut for such, planned now if there is none
        yet."""
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
            lambda: is_undecided and self._has_stranger(inputs, provenance_of),
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

    def _has_stranger(self, inputs: Sequence[Any], known: Mapping[int, Provenance]) -> bool:
        """Whether a tensor came that the program may have made of the batch before the call."""
        return any(
            index not in known
            and self._placeholders[index].place == "local"
            and is_plain(inputs[index])
            for index in self._looked_up
        )

    def _run_all(self, inputs: Sequence[Any], lazy: LazyInputs | None) -> Any:
        """Runs the whole graph, which needs all values of its own inputs."""
        return self._run_whole(*(inputs if lazy is None else lazy.computed()))

    def _run_timed(
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

        call.recall(is_check=True)  # which is no part of either

        return repricer.run_timed(cut, lambda: self._run_all(inputs, lazy), run_suffix)


def _taken_apart(inputs: Sequence[Any]) -> tuple[Sequence[Any], LazyInputs | None]:
    """The inputs of a call, and what is known of the lazy tensors among them, if there are any."""
    if LazyTensor not in map(type, inputs):
        return inputs, None
    lazy = LazyInputs.of(inputs)
    return lazy.inputs, lazy
