# SPDX-License-Identifier: Apache-2.0
"""One captured graph in training: finds its plans, runs the suffix when it safely can, else the
whole graph.

Every call asks again whether each batch tensor is the loader's own, untouched, whether the workers
sent what the suffix needs and whether the constants are still what the workers were told. Any doubt
runs the whole graph on the raw inputs, which are always there.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from penstock.capture import Placeholder, classify, first_sentence, is_plain
from penstock.compiled_models import CompiledGraph
from penstock.constants import is_same_bits
from penstock.cut_context import CutContext
from penstock.expression import Expression, Result, holds
from penstock.extended_graph import extend
from penstock.lazy_inputs import LazyInputs
from penstock.lazy_tensor import LazyTensor
from penstock.lazy_value import compute_waiting
from penstock.live_cut import GraphCall, LiveCut, Variant, has_layouts, spoken_batches
from penstock.lowering import Lowering, lower
from penstock.planning import BoundaryValue, plan_cut
from penstock.provenance import BatchHandle, Provenance
from penstock.replaced_cuts import ReplacesCuts
from penstock.repricing import CutPricing
from penstock.sizes import REMEMBERED_SIZES, Unlowerable
from penstock.surroundings import (
    REGION_BEGIN,
    AutocastState,
    autocast_put_back,
    refuse_by_surroundings,
)
from penstock.unused_cuts import FORGOTTEN_MAX
from penstock.whole_comparison import Side, first_difference

logger = logging.getLogger(__name__)

# How many plans one captured graph may have (other sizes, other uses of the batch), and how many
# refusals it remembers, before it stops trying. Each costs a calibration run.
PLANS_MAX = 8
REFUSALS_MAX = 8
# How often a constant may change before it counts as state.
CONSTANT_CHANGES_MAX = 1


class CutGraph(ReplacesCuts):
    """The callable that Dynamo runs in place of one captured graph. Confined to the training
    thread."""

    def __init__(
        self,
        context: CutContext,
        graph_module: fx.GraphModule,
        placeholders: Sequence[Placeholder],
        compiled: CompiledGraph | None = None,
    ) -> None:
        """`compiled` is what the user's compiler made of the graph, where there is one."""
        self._context = context
        self._options = context.options_of_graph()
        context.unused.add_graph(self)
        self._whole = graph_module
        if isinstance(graph_module, _LazyGraphModule):
            graph_module.real_recompile()  # or its forward goes through three more calls
        self._compiled = compiled
        self._run_whole = graph_module.forward if compiled is None else compiled.run_whole
        self._has_regions = any(node.target is REGION_BEGIN for node in graph_module.graph.nodes)
        self._placeholders = list(placeholders)
        # A batch's tensor that a module keeps counts as a constant, which will be seen to change.
        self._looked_up = [
            i
            for i, p in enumerate(placeholders)
            if p.is_tensor and not p.is_parameter and p.place != "module"
        ]
        self._cuts: list[LiveCut] = []
        self._refusals = 0
        self._refused_patterns: set[tuple[Any, ...]] = set()
        self._mistrusted: dict[Variant, dict[int, str]] = {}  # units that stay, and why
        self._changes: Counter[str] = Counter()  # of constants, by label
        self._forgotten: Counter[tuple[Any, ...]] = Counter()  # cuts that were not used, by call
        self._versions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # when first used

    def __call__(self, *inputs: Any) -> Any:
        if not self._has_regions:
            return self._run(inputs)
        with autocast_put_back():
            return self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> Any:
        if not self._context.is_open:
            return self._run_whole(*inputs)
        lazy = LazyInputs.of(inputs) if LazyTensor in map(type, inputs) else None
        if lazy is not None:
            inputs = lazy.inputs
        try:
            call, cut = self._find(inputs, lazy)
            if call is not None and cut is not None:
                cut = self._repriced(cut, call)
            boundary = None if call is None or cut is None else self._boundary(cut, call)
        except Exception as error:
            # Nothing of the graph has run yet, so the whole of it still can.
            logger.debug("the cut failed", exc_info=True)
            self._context.give_up(f"the cut failed ({type(error).__name__}: {error})")
            return self._run_all(inputs, lazy)
        if call is None or cut is None:
            return self._run_all(inputs, lazy)
        self._context.note_plan(cut.plan)
        self._context.batch = weakref.ref(call.handle)
        cut.is_used = True
        if boundary is not None and self._context.compiler is not None:
            self._context.compiler.look_at(cut, call)
        if cut.suffix is None or boundary is None:
            results = self._run_all(inputs, lazy)
        elif cut.pricing is not None and cut.pricing.wants_spots:
            results = self._run_spot(cut, call, boundary, inputs, lazy)
        else:
            if lazy is not None and cut.writes_inputs:
                compute_waiting(call.handle)
            results = cut.suffix(*call.inputs, *boundary)
        for item in cut.planned.results:
            self._record(item, call, results[item.position])
        return results

    def _record(self, item: Result, call: GraphCall, result: Any) -> None:
        """Notes what a result follows from, for the graph that it may be given to."""
        if isinstance(result, torch.Tensor) and holds(result):
            taken = [call.inputs[index] for index in item.taken]
            inputs = tuple(
                TensorWeakRef(value) if role.kind == "leaf" else value
                for role, value in zip(item.expression.inputs, taken, strict=True)
            )
            self._context.provenance.record_result(
                result, Provenance(call.handle, item.expression, result._version, inputs)
            )

    def _find(
        self, inputs: Sequence[Any], lazy: LazyInputs | None
    ) -> tuple[GraphCall | None, LiveCut | None]:
        """What of the inputs is of a batch, and the cut for such, planned now if there is none
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
        self._context.note_inputs(
            handle is not None,
            lambda: self._has_stranger(inputs, provenance_of),
            follows_calls=lazy is not None and lazy.follows_calls,
        )
        if handle is None:
            return None, None
        call = GraphCall(handle, provenance_of, inputs, {} if lazy is None else lazy.waiting)
        pattern = call.pattern
        for cut in self._cuts:
            if cut.variant[0] == pattern:
                all_inputs = inputs
                if cut.added or call.waiting:
                    all_inputs = call.with_added(cut.added, cut.variant[1])
                if cut.lowering.conditions.hold(all_inputs):
                    call.inputs = all_inputs
                    return call, cut
        return call, self._plan(call)

    def _has_stranger(self, inputs: Sequence[Any], known: Mapping[int, Provenance]) -> bool:
        """Whether a tensor came that the program may have made of the batch before the call."""
        return any(
            index not in known
            and self._placeholders[index].place == "local"
            and is_plain(inputs[index])
            for index in self._looked_up
        )

    def _plan(self, call: GraphCall) -> LiveCut | None:
        if len(self._cuts) >= PLANS_MAX or self._refusals >= REFUSALS_MAX:
            return None
        signature = (call.pattern, tuple(_signature(value) for value in call.inputs))
        if signature in self._refused_patterns or self._forgotten[signature] > FORGOTTEN_MAX:
            return None
        self._context.has_planned = True
        try:
            cut = self._try_plan(call)
        except Unlowerable as refusal:
            self._refuse(signature, str(refusal))
            return None
        except Exception as error:
            # Planning is no part of training: whatever goes wrong in it must not end the user's
            # run.
            logger.debug("planning failed", exc_info=True)
            self._refuse(signature, f"planning failed: {type(error).__name__}: {error}")
            return None
        if self._context.repricer is not None:
            self._context.repricer.note_odd_step()
        cut.signature = signature
        return cut

    def _refuse(self, signature: tuple[Any, ...], reason: str) -> None:
        self._refusals += 1
        self._refused_patterns.add(signature)
        self._context.refuse_graph(reason)

    def _try_plan(self, call: GraphCall) -> LiveCut:
        refuse_by_surroundings()
        # Whatever waits is needed for the calibration.
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
                label = self._placeholders[index].label
                raise Unlowerable(
                    f"the batch tensor {label} requires grad, is not strided or is not on the CPU"
                )
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
            self._placeholders,
            call.inputs,
            lambda tensor: leaf_index.get(id(tensor)),
            {id(buffer): buffer for buffer in self._context.buffers()},
        )
        waiting = call.waiting.keys() & expressions.keys()
        extended = extend(self._whole, own, expressions, waiting)
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
            self._options,
            self._mistrusted.get(variant, {}),
        )
        if expressions and self._writes_to_inputs(lowering):
            raise Unlowerable("it writes to what an earlier part of forward may share memory with")
        if _gives_out_waiting(lowering):
            raise Unlowerable("it returns what the program made of the batch before")
        cut = self._live(lowering, variant, extended.added, planned, inputs)
        if self._context.repricer is not None and planned.native is not None:
            cut.pricing = CutPricing()
        call.inputs = inputs
        self._put_in_force(cut, inputs)
        return cut

    def _boundary(self, cut: LiveCut, call: GraphCall) -> list[torch.Tensor] | None:
        """The boundary tensors of this call, or None when the whole graph has to run."""
        if cut.constants is None:
            return None
        changed = cut.constants.changed(call.inputs)
        if changed:
            self._drop(cut, changed)
            return None
        sizes = cut.lowering.conditions.sizes(call.inputs)
        boundary = self._shipped(cut, call, sizes)
        if boundary is None:
            # Another draw than a worker's would be another training, at a moment of the clock's.
            return None if cut.drawn is None else cut.drawn.run(call.inputs, call.handle)
        # Kernels split their work by size and by the number of threads, and the workers have one
        # thread each: a combination that is new here is compared like a first batch.
        setting = (sizes, torch.get_num_threads())
        is_due = cut.used_count % self._context.verify_every == 0
        if is_due or setting not in cut.verified or cut.mistrusts != self._context.mistrusts:
            if not self._verify(cut, call, boundary):
                return None
            if self._compiled is not None and not self._compare_whole(cut, call, boundary):
                return None
            cut.mistrusts = self._context.mistrusts
            cut.unchecked.clear()
            if len(cut.verified) < REMEMBERED_SIZES:
                cut.verified.add(setting)
        else:
            cut.unchecked.append((call.handle.epoch, call.handle.sequence))
        cut.used_count += 1
        return boundary

    def _shipped(
        self, cut: LiveCut, call: GraphCall, sizes: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        """What came of the boundary tensors with the batch, if it is all that is needed."""
        boundary: list[torch.Tensor] = []
        shipped = call.handle.boundary
        for item in cut.planned.boundary:
            tensor = shipped.get(item.key)
            if tensor is None:
                return None
            boundary.append(tensor)
        for tensor in boundary:
            # A program that writes to what the model returned may have written to a boundary
            # tensor.
            first = self._versions.setdefault(tensor, tensor._version)
            if first != tensor._version:
                return None
        return boundary if has_layouts(boundary, cut.layouts(sizes)) else None

    def _verify(self, cut: LiveCut, call: GraphCall, boundary: list[torch.Tensor]) -> bool:
        """Runs what moved on the raw inputs and compares bit for bit."""
        assert cut.reference is not None
        if self._context.repricer is not None:
            self._context.repricer.note_odd_step()
        with torch.no_grad():
            try:
                computed = iter(cut.reference(*call.inputs))
                drawn = [] if cut.drawn is None else cut.drawn.run(call.inputs, call.handle)
            except Exception:
                return False  # the whole graph will say the same, in the user's own words
        wrong = [
            item
            for index, (item, tensor) in enumerate(zip(cut.planned.boundary, boundary, strict=True))
            if not is_same_bits(tensor, drawn[index] if item.is_random else next(computed))
        ]
        if wrong:
            self._mistrust(cut, call, wrong)
        return not wrong

    def _compare_whole(self, cut: LiveCut, call: GraphCall, boundary: list[torch.Tensor]) -> bool:
        """Runs the compiled suffix and the compiled whole and compares bit for bit."""
        assert cut.suffix is not None and self._compiled is not None
        suffix, count = cut.suffix, len(self._placeholders)
        name = self._compiled.user.backend_name
        try:
            difference = first_difference(
                Side(lambda copies: self._run_whole(*copies[:count])),
                Side(lambda copies: suffix(*copies, *boundary)),
                call.inputs,
            )
            reason = f"compiled by {name} without what moves, the model has other {difference}"
        except Exception as error:
            logger.debug("the suffix cannot be compiled", exc_info=True)
            difference = first_sentence(error)
            reason = f"{name} cannot compile the part that stays ({difference})"
        if difference is None:
            return True
        self.forget(cut)
        signature = (call.pattern, tuple(_signature(value) for value in call.inputs[:count]))
        self._refuse(signature, reason)
        return False

    def _mistrust(self, cut: LiveCut, call: GraphCall, wrong: Sequence[BoundaryValue]) -> None:
        """Takes calls back into the trainer of which a worker made something else. Batches that are
        under way lack what the next cut needs of them, so they are computed anew."""
        operators = sorted({item.operator for item in wrong})
        threads = torch.get_num_threads()
        what = (
            f"the workers' result of {', '.join(operators)} differs from the trainer's own in "
            f"batch {call.handle.sequence} of epoch {call.handle.epoch} (workers run on 1 thread, "
            f"the trainer on {threads})"
        )
        for item in wrong:
            self._mistrusted.setdefault(cut.variant, {})[item.unit] = (
                "a worker's result of it was not the trainer's own"
            )
        self.forget(cut)
        self._context.mistrust(
            operators,
            f"{what}; it runs in the trainer from here on. {spoken_batches(cut.unchecked)}",
        )

    def forget_unused(self, cut: LiveCut) -> None:
        logger.debug("a plan was not used for long")
        self._forgotten[cut.signature] += 1
        self.forget(cut)

    def _drop(self, cut: LiveCut, changed: Sequence[int]) -> None:
        """Forgets a cut whose constants changed. It is planned again; what keeps changing is
        state."""
        for index in changed:
            label = cut.lowering.inputs[index].label
            self._changes[label] += 1
            logger.debug("constant %s changed", label)
        self.forget(cut)


def _gives_out_waiting(lowering: Lowering) -> bool:
    """Whether a result shares memory with what is computed in place of an input: the program has
    that input, too, and would have other memory there."""
    forms = lowering.recording.forms
    leaves = {
        forms[name].storage
        for name, index in lowering.input_names.items()
        if lowering.inputs[index].kind == "leaf"
    }
    waiting = {forms[name].storage for name in lowering.waiting} - leaves
    return any(forms[name].storage in waiting for name in lowering.output_names)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    return value if isinstance(value, (int, float, bool)) else None
