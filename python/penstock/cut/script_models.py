# SPDX-License-Identifier: Apache-2.0
"""Run TorchScript modules and functions in training.

The native part reads the program, and the remaining part is again a TorchScript program, with the
module's parameters. TorchScript's optimizer makes other kernels and other gradients from the second
run of a program on. So a cut is used only after the module and its remaining part have both run
often enough to be optimized, and gave the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock import _C
from penstock.compat.modules import has_optimized_executor, is_tracing, set_small_groups
from penstock.compat.operators import tree_leaves
from penstock.cut.cut_context import CutContext, UsedCut
from penstock.cut.live_cut import GraphCall
from penstock.cut.offloaded_call import StandIn
from penstock.cut.whole_comparison import Side, first_difference, observe
from penstock.graph.capture import AutocastState, is_plain, refuse_by_surroundings
from penstock.graph.constants import is_same_bits
from penstock.graph.planning import Layout
from penstock.graph.script_plan import ScriptCut, Setting, plan_program
from penstock.graph.sizes import REMEMBERED_MAKERS, REMEMBERED_SIZES, Unlowerable
from penstock.tracking.batch_origin import BatchHandle, Provenance
from penstock.tracking.lazy_batches import LazyInputs
from penstock.tracking.lazy_tensor import memory_in

logger = logging.getLogger(__name__)

# A program is profiled, then optimized, and so are the programs of its gradients; from this run on
# it no longer changes.
SETTLED_RUNS = 4
# Limits of the plans of one module (its modes, other arguments), and of its refusals.
PLANS_MAX = 8


class OffloadedScript(StandIn):
    """Replaces the forward of a ScriptModule, or a ScriptFunction.

    Confined to the training thread.
    """

    def __init__(self, context: CutContext, model: Any, call_impl: Callable[..., Any]) -> None:
        self.context = context
        # The function that runs without penstock, and the former one in this position.
        self.call_impl = call_impl
        self.former = call_impl
        self._model = model
        self._cuts: list[ScriptCut] = []
        self._refusals = 0
        self._constant_changes = 0
        self._bind_lifetimes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self.call_impl(*args, **kwargs)
        if not self.context.is_open:
            return self._run_whole(args, kwargs)
        self.context.begin_call()
        try:
            found = self._find(args, kwargs)
        except Exception as error:
            # No part has run yet, so the whole program still can.
            logger.debug("the cut failed", exc_info=True)
            self.context.give_up(f"the cut failed ({type(error).__name__}: {error})")
            found = None
        try:
            if found is None:
                return self._run_whole(args, kwargs)
            cut, call, boundary = found
            return cut.suffix.run(self._model, call, boundary)
        finally:
            self.context.end_call(True)

    def _run_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole program on plain tensors: TorchScript and its backends read memory."""
        if self.context.provenance.deferral is not None:
            args, kwargs = memory_in((args, kwargs))
        return self.call_impl(*args, **kwargs)

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ScriptCut, Any, list[torch.Tensor]] | None:
        """Return the cut for this call and its boundary tensors, or None to run the whole."""
        try:
            call = _C.ScriptCall(self._model, args, kwargs)
        except (TypeError, RuntimeError):
            return None  # the module raises its own error
        tensors = call.tensors
        given = self._given(tensors)
        if given is None:
            self._note_nests(args, kwargs, tensors)
            return None
        self.context.call.is_foreign = False
        self.context.call.note_batch(given.handle)
        cut = self._cut_for(call, given)
        if cut is None:
            return None
        self.context.call.plans.append(cut.planned.plan)
        boundary = self._boundary(cut, call, given)
        self.context.call.cuts.append(UsedCut(cut.raw_leaves, cut.keys, cut.used_count > 0))
        if boundary is None:
            cut.runs[_mode()] += 1
            given.recall(is_check=cut.runs[_mode()] <= SETTLED_RUNS)
            return None
        given.recall(cut.raw_leaves)
        return cut, call.with_tensors(given.inputs), boundary

    def _note_nests(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> None:
        seen = {id(tensor) for tensor in tensors}
        for value in tree_leaves((args, kwargs)):
            is_tensor = isinstance(value, torch.Tensor) and id(value) not in seen
            if is_tensor and self.context.provenance.lookup(value) is not None:
                self.context.call.is_foreign = False
                self.context.plan.refuse(
                    "the module must take tensors or tuples of tensors for TorchScript to be "
                    "captured, but it takes the batch in a list or a dict"
                )
                return

    def _given(self, tensors: Sequence[torch.Tensor]) -> GraphCall | None:
        """Return the facts about the tensors of a call; None if they are of no batch, or of two."""
        lazy = LazyInputs.of(tensors)
        handle: BatchHandle | None = None
        leaves: dict[int, Provenance] = {}
        inputs = list(lazy.inputs)
        for index, tensor in enumerate(inputs):
            if index in lazy.waiting:
                tensor = inputs[index] = lazy.waiting[index].materialise()
            found = lazy.found[index] if index in lazy.withheld else None
            if found is None and is_plain(tensor):
                found = self.context.provenance.lookup(tensor)
            if found is None or not isinstance(found.source, int):
                continue
            if handle is not None and found.handle is not handle:
                return None
            handle = found.handle
            leaves[index] = found
        if handle is None:
            return None
        return GraphCall(handle, leaves, inputs, withheld=lazy.withheld)

    def _cut_for(self, call: Any, given: GraphCall) -> ScriptCut | None:
        leaf_indices: list[int | None] = [None] * len(given.inputs)
        for index, found in given.found.items():
            assert isinstance(found.source, int)
            leaf_indices[index] = found.source
        for cut in self._cuts:
            if cut.leaf_indices == leaf_indices and cut.program.holds() and cut.call.is_like(call):
                return cut
        if len(self._cuts) + self._refusals >= PLANS_MAX:
            return None
        try:
            given.recall(is_check=True)
            cut = self._plan(call.with_tensors(given.inputs), leaf_indices, given.handle)
        except Unlowerable as refusal:
            self._refuse(str(refusal))
            return None
        except Exception as error:
            # Planning is not part of training: its errors must not end the user's run.
            logger.debug("planning failed", exc_info=True)
            self._refuse(f"planning failed: {type(error).__name__}: {error}")
            return None
        self._cuts.append(cut)
        return cut

    def _refuse(self, reason: str) -> None:
        self._refusals += 1
        self.context.plan.refuse(reason)

    def _plan(self, call: Any, leaf_indices: list[int | None], handle: BatchHandle) -> ScriptCut:
        _refuse_autocast()
        refuse_by_surroundings()
        options = self.context.with_link(self.context.options)
        cut = plan_program(self._model, call, leaf_indices, handle.leaf_count, options)
        if cut.boundary:
            self.context.prefixes.install(cut.planned)
            self._note_change()
        return cut

    def _note_change(self) -> None:
        if self.context.withholding is not None:
            self.context.withholding.send_whole()

    def _boundary(self, cut: ScriptCut, call: Any, given: GraphCall) -> list[torch.Tensor] | None:
        handle = given.handle
        if cut.constants is None or AutocastState.now() != AutocastState(None, None):
            return None
        if cut.constants.changed(cut.program.constants, handle.epoch):
            self._forget(cut)
            self._constant_changes += 1
            if self._constant_changes > 1:
                self.context.give_up("a buffer that is copied to the workers keeps changing")
            return None
        if cut.settings != _C.kernel_settings():
            self._forget(cut)  # it is planned again under the present settings
            return None
        boundary = [handle.boundary.get(item.key) for item in cut.boundary]
        if cut.runs[_mode()] < SETTLED_RUNS or any(tensor is None for tensor in boundary):
            return None
        values = [
            tensor.to(item.device)
            for item, tensor in zip(cut.boundary, boundary, strict=True)
            if tensor is not None
        ]
        sizes = tuple(tuple(tensor.shape) for tensor in given.inputs)
        setting = (sizes, torch.get_num_threads(), *_mode())
        if setting in cut.refused:
            return None
        is_due = cut.used_count % self.context.verify_every == 0
        is_due = is_due or setting not in cut.layouts
        if is_due or handle.maker not in cut.makers:
            given.recall(is_check=True)
            call = call.with_tensors(given.inputs)
            if not self._is_right(cut, call, values, handle):
                return None
            if len(cut.makers) >= REMEMBERED_MAKERS:
                cut.makers.clear()
            cut.makers.add(handle.maker)
        if is_due:
            if not self._is_suffix_right(cut, call, values, setting):
                return None
            cut.unchecked.clear()
            if len(cut.layouts) >= REMEMBERED_SIZES:
                cut.layouts.clear()
            cut.layouts[setting] = [_layout(tensor) for tensor in values]
        elif cut.layouts[setting] != [_layout(tensor) for tensor in values]:
            return None
        else:
            cut.unchecked.add(handle.epoch, handle.sequence)
        cut.used_count += 1
        return values

    def _is_right(
        self,
        cut: ScriptCut,
        call: Any,
        boundary: list[torch.Tensor],
        handle: BatchHandle,
    ) -> bool:
        """Compare the workers' results."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            expected = cut.reference.run(self._model, call)
        wrong = sorted(
            {
                item.operator
                for item, tensor, value in zip(cut.boundary, boundary, expected, strict=True)
                if not is_same_bits(tensor, value)
            }
        )
        if wrong:
            self.context.mismatches += 1
            self.context.give_up(
                f"the workers' result of {', '.join(wrong)} differs from the trainer's result in "
                f"batch {handle.sequence} of epoch {handle.epoch}. "
                f"{cut.unchecked}"
            )
        return not wrong

    def _is_suffix_right(
        self, cut: ScriptCut, call: Any, boundary: list[torch.Tensor], setting: Setting
    ) -> bool:
        """Compare the results of the remaining part with the results of the whole."""
        difference = self._difference(cut, call, boundary)
        if difference is not None:
            if len(cut.refused) >= REMEMBERED_SIZES:
                cut.refused.clear()
            cut.refused.add(setting)
            self.context.plan.refuse(
                f"the model run by TorchScript without the moved calls has other {difference}"
            )
        return difference is None

    def _difference(self, cut: ScriptCut, call: Any, boundary: list[torch.Tensor]) -> str | None:
        """Return the first result in which the remaining part differs from the whole.

        Both run on copies of the model.
        """
        whole = _C.whole_script(self._model)

        def side(part: Any, more: list[torch.Tensor]) -> Side:
            model = self._model
            held: list[torch.Tensor] = []
            if isinstance(model, torch.nn.Module):
                model = _copy_of_model(model)
                held = [*model.parameters(), *model.buffers()]
            return Side(lambda tensors: part.run(model, call.with_tensors(tensors), more), held)

        for suffix, keeps_small_groups in cut.suffixes(bool(whole.optimized_operators)):
            with _small_groups(keeps_small_groups):
                for _ in range(SETTLED_RUNS):
                    observe(side(suffix, boundary), call.tensors)
            # One batch does not show every rounding: the reassembled program has to be the same,
            # too.
            if cut.program.is_optimized_alike(cut.native, whole, suffix):
                cut.suffix = suffix
                break
        else:
            return "kernels"
        return first_difference(side(whole, []), side(cut.suffix, boundary), call.tensors)

    def _forget(self, cut: ScriptCut) -> None:
        self._cuts.remove(cut)
        self.context.prefixes.withdraw(cut.planned)
        self._note_change()


def _copy_of_model(model: torch.nn.Module) -> Any:
    """Return a copy with separate parameters.

    With gradients on, TorchScript would copy them as results of the model's parameters.
    """
    with torch.no_grad():
        model_copy = copy.deepcopy(model)
    for ours, theirs in zip(model_copy.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return model_copy


@contextlib.contextmanager
def _small_groups(keeps_them: bool) -> Iterator[None]:
    """Set whether TorchScript keeps differentiable groups that have few operators.

    It is a process-wide switch, which is normally off.
    """
    if not keeps_them:
        yield
        return
    set_small_groups(True)
    try:
        yield
    finally:
        set_small_groups(False)


def _refuse_autocast() -> None:
    if AutocastState.now() != AutocastState(None, None):
        raise Unlowerable("autocast must be off for a TorchScript module to be captured")


def _mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), has_optimized_executor()


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
