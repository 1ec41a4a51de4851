# SPDX-License-Identifier: Apache-2.0
"""One captured graph in training: finds its plans, runs the suffix when it safely can, else the
whole graph.

Every call asks again whether each batch tensor is the loader's own, untouched, whether the workers
sent what the suffix needs and whether the constants are still what the workers were told. Any doubt
runs the whole graph on the raw inputs, which are always there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.capture import Placeholder, classify, is_plain
from penstock.constants import ConstantWatch, is_same_bits
from penstock.cut_context import CutContext
from penstock.known_ids import KnownIds
from penstock.lowering import Lowering, lower
from penstock.planning import Layout, PlannedCut, plan_cut
from penstock.sizes import REMEMBERED_SIZES, Unlowerable

if TYPE_CHECKING:
    from penstock.provenance import BatchHandle

logger = logging.getLogger(__name__)

# How many plans one captured graph may have (other sizes, other uses of the batch), and how many
# refusals it remembers, before it stops trying. Each costs a calibration run.
PLANS_MAX = 8
REFUSALS_MAX = 8
# How often a constant may change before it counts as state.
CONSTANT_CHANGES_MAX = 1


@dataclass
class _Cut:
    """A plan that is in use: what it needs of a call, and what it runs."""

    lowering: Lowering
    leaves: tuple[tuple[int, int], ...]  # input of the graph, tensor of the batch
    planned: PlannedCut | None  # None: nothing moves
    suffix: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    constants: ConstantWatch | None = None
    used_count: int = 0
    verified: set[tuple[tuple[int, ...], int]] = field(default_factory=set)  # sizes, threads
    _layouts: dict[tuple[int, ...], list[Layout]] = field(default_factory=dict)

    def layouts(self, sizes: tuple[int, ...]) -> list[Layout]:
        """What the boundary tensors look like when eager makes them: kernels depend on it."""
        assert self.planned is not None
        layouts = self._layouts.get(sizes)
        if layouts is None:
            if len(self._layouts) >= REMEMBERED_SIZES:
                self._layouts.clear()
            values = self.lowering.conditions.values(sizes)
            layouts = [item.layout(values) for item in self.planned.boundary]
            self._layouts[sizes] = layouts
        return layouts


class CutGraph:
    """The callable that Dynamo runs in place of one captured graph. Confined to the training
    thread."""

    def __init__(
        self, context: CutContext, graph_module: fx.GraphModule, placeholders: Sequence[Placeholder]
    ) -> None:
        self._context = context
        self._whole = graph_module
        self._run_whole = graph_module.forward
        self._placeholders = list(placeholders)
        self._tensor_inputs = [i for i, p in enumerate(placeholders) if p.is_tensor]
        self._cuts: list[_Cut] = []
        self._refusals = 0
        self._refused_patterns: set[tuple[Any, ...]] = set()
        self._changes: dict[int, int] = {}
        self._versions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # when first used

    def __call__(self, *inputs: Any) -> Any:
        if self._context.is_open:
            try:
                ready = self._suffix_and_boundary(inputs)
            except Exception as error:
                # Nothing of the model has run yet, so the whole of it still can.
                logger.debug("the cut failed", exc_info=True)
                self._context.give_up(f"the cut failed ({type(error).__name__}: {error})")
                ready = None
            if ready is not None:
                suffix, boundary = ready
                return suffix(*inputs, *boundary)
        return self._run_whole(*inputs)

    def _suffix_and_boundary(
        self, inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], list[torch.Tensor]] | None:
        """What to run in place of the whole graph, or None when the whole graph has to run."""
        cut, handle = self._find(inputs)
        if cut is None or cut.suffix is None or handle is None:
            return None
        boundary = self._boundary(cut, handle, inputs)
        return None if boundary is None else (cut.suffix, boundary)

    def _find(self, inputs: Sequence[Any]) -> tuple[_Cut | None, BatchHandle | None]:
        """The cut for these inputs, planned now if there is none yet, and the batch they are
        from."""
        handle: BatchHandle | None = None
        leaves: list[tuple[int, int]] = []
        for index in self._tensor_inputs:
            found = self._context.provenance.lookup(inputs[index])
            if found is None:
                continue
            if handle is not None and found.handle is not handle:
                return None, None  # tensors of two batches at once
            handle = found.handle
            leaves.append((index, found.leaf_index))
        self._context.note_call(is_foreign=handle is None)
        if handle is None:
            return None, None
        pattern = tuple(leaves)
        for cut in self._cuts:
            if cut.leaves == pattern and cut.lowering.conditions.hold(inputs):
                return cut, handle
        return self._plan(pattern, handle, inputs), handle

    def _plan(
        self, leaves: tuple[tuple[int, int], ...], handle: BatchHandle, inputs: Sequence[Any]
    ) -> _Cut | None:
        if len(self._cuts) >= PLANS_MAX or self._refusals >= REFUSALS_MAX:
            return None
        signature = (leaves, tuple(_signature(value) for value in inputs))
        if signature in self._refused_patterns:
            return None
        try:
            cut = self._try_plan(leaves, handle.leaf_count, inputs)
        except Unlowerable as refusal:
            self._refuse(signature, str(refusal))
            return None
        except Exception as error:
            # Planning is no part of training: whatever goes wrong in it must not end the user's
            # run.
            logger.debug("planning failed", exc_info=True)
            self._refuse(signature, f"planning failed: {type(error).__name__}: {error}")
            return None
        self._cuts.append(cut)
        return cut

    def _refuse(self, signature: tuple[Any, ...], reason: str) -> None:
        self._refusals += 1
        self._refused_patterns.add(signature)
        self._context.refuse_graph(reason)

    def _try_plan(
        self, leaves: tuple[tuple[int, int], ...], leaf_count: int, inputs: Sequence[Any]
    ) -> _Cut:
        for index, _ in leaves:
            if not is_plain(inputs[index]):
                label = self._placeholders[index].label
                raise Unlowerable(
                    f"the batch tensor {label} requires grad, is not strided or is not on the CPU"
                )
        leaf_index = {id(inputs[index]): leaf for index, leaf in leaves}
        changing = frozenset(i for i, n in self._changes.items() if n > CONSTANT_CHANGES_MAX)
        graph_inputs = classify(
            self._placeholders,
            inputs,
            lambda tensor: leaf_index.get(id(tensor)),
            {id(buffer): buffer for buffer in self._context.model.buffers()},
            changing,
        )
        lowering, planned = plan_cut(
            lambda symbolic: lower(self._whole, graph_inputs, inputs, symbolic=symbolic),
            inputs,
            leaf_count,
            self._context.options,
        )
        cut = _Cut(lowering, leaves, planned if planned.boundary else None)
        if cut.planned is not None:
            assert planned.suffix is not None and planned.reference is not None
            cut.suffix = planned.suffix.forward
            cut.reference = planned.reference.forward
            cut.constants = ConstantWatch({i: inputs[i] for i in planned.constant_inputs})
            self._context.install(planned)
        self._context.known_ids.append(KnownIds.of(lowering, planned, leaves, inputs))
        self._context.publish(planned.plan)
        return cut

    def _boundary(
        self, cut: _Cut, handle: BatchHandle, inputs: Sequence[Any]
    ) -> list[torch.Tensor] | None:
        """The boundary tensors of this call, or None when the whole graph has to run."""
        assert cut.planned is not None and cut.constants is not None
        changed = cut.constants.changed(inputs)
        if changed:
            self._drop(cut, changed)
            return None
        boundary: list[torch.Tensor] = []
        shipped = handle.boundary
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
        sizes = cut.lowering.conditions.sizes(inputs)
        if not has_layouts(boundary, cut.layouts(sizes)):
            return None
        # Kernels split their work by size and by the number of threads, and the workers have one
        # thread each: a combination that is new here is compared like a first batch.
        setting = (sizes, torch.get_num_threads())
        is_due = cut.used_count % self._context.verify_every == 0
        if is_due or setting not in cut.verified:
            if not self._verify(cut, inputs, boundary):
                return None
            if len(cut.verified) < REMEMBERED_SIZES:
                cut.verified.add(setting)
        cut.used_count += 1
        return boundary

    def _verify(self, cut: _Cut, inputs: Sequence[Any], boundary: list[torch.Tensor]) -> bool:
        """Runs what moved on the raw inputs and compares bit for bit."""
        assert cut.planned is not None and cut.reference is not None
        compared = [
            (item, tensor)
            for item, tensor in zip(cut.planned.boundary, boundary, strict=True)
            if not item.is_random
        ]
        with torch.no_grad():
            try:
                expected = cut.reference(*inputs)
            except Exception:
                return False  # the whole graph will say the same, in the user's own words
        wrong = [
            item.operator
            for (item, tensor), value in zip(compared, expected, strict=True)
            if not is_same_bits(tensor, value)
        ]
        if not wrong:
            return True
        self._context.give_up(
            f"the workers' result of {', '.join(sorted(set(wrong)))} differs from the trainer's own"
            f" (workers run on 1 thread, the trainer on {torch.get_num_threads()})"
        )
        return False

    def _drop(self, cut: _Cut, changed: Sequence[int]) -> None:
        """Forgets a cut whose constants changed. It is planned again; what keeps changing is
        state."""
        for index in changed:
            self._changes[index] = self._changes.get(index, 0) + 1
            logger.debug("constant %s changed", self._placeholders[index].label)
        self._cuts.remove(cut)
        self._context.known_ids[:] = [
            known for known in self._context.known_ids if known.planned is not cut.planned
        ]


def has_layouts(tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> bool:
    return all(
        (tensor.dtype, tuple(tensor.shape), tensor.stride()) == layout
        for tensor, layout in zip(tensors, layouts, strict=True)
    )


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    return value if isinstance(value, (int, float, bool)) else None
