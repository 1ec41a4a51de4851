# SPDX-License-Identifier: Apache-2.0
"""Define one cut of a captured graph while it is in use, and one call of the graph.

A cut may draw random numbers (`DrawnPrefix`), and it has the ids that a batch will look up in the
embeddings of the model (`KnownIds`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock import _C
from penstock.errors import PenstockError
from penstock.graph.constants import ConstantWatch
from penstock.graph.expression import Expression
from penstock.graph.lowering import Lowering, leaves_of
from penstock.graph.plan import Plan
from penstock.graph.planning import Layout, PlannedCut, UncheckedBatches
from penstock.graph.recording import Name, RecordedOp
from penstock.graph.sizes import REMEMBERED_SIZES
from penstock.tracking.batch_origin import BatchHandle, Provenance
from penstock.tracking.lazy_value import LazyValue

# The batch's inputs: index, kind, and whether the value is still to be computed.
Pattern = tuple[tuple[int, int | Expression, bool], ...]
# A pattern, and the inputs that are derived by their expressions. It determines the numbering of
# calls.
Variant = tuple[Pattern, frozenset[int]]
# A pattern, and the graph's original inputs without their values: such calls share one plan.
Signature = tuple[Any, ...]

# Operators whose first two arguments are a table and the ids to look up in it.
_LOOKUPS = ("aten::embedding", "aten::embedding_bag", "aten::_embedding_bag")
# Operators that keep the ids and their order. EmbeddingBag flattens its input with them.
_SAME_IDS = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::clone")


@dataclass
class LiveCut:
    """The state of a cut that is in use, and the code that it runs.

    Confined to the training thread.
    """

    lowering: Lowering
    variant: Variant
    added: list[tuple[int, int]]  # inputs in addition to the graph's: see ExtendedGraph
    planned: PlannedCut
    suffix: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    constants: ConstantWatch | None = None
    drawn: DrawnPrefix | None = None  # set if the prefix draws random numbers
    writes_inputs: bool = False  # to tensors that others may depend on
    mismatches: int = 0  # the context's count at the last comparison of this cut
    differences: list[float] = field(init=False)  # largest so far, by boundary tensor
    used_count: int = 0
    unchecked_count: int = 0  # uses since the last comparison
    is_used: bool = True  # recently; see UnusedCuts
    former: LiveCut | None = None  # batches in flight may have its boundary tensors
    signature: Signature = ()  # of the call that it was planned for
    priced: _C.PricedCut | None = None  # set if a cut of another price may replace it
    plan: Plan = field(init=False)  # the plan as shown: with the price, once known
    unchecked: UncheckedBatches = field(default_factory=UncheckedBatches)
    verified: set[tuple[tuple[int, ...], int]] = field(default_factory=set)  # sizes, threads
    verified_makers: set[int] = field(default_factory=set)  # workers of which a batch was compared
    # The process's settings at planning time: the workers' results depend on them.
    settings: str = field(default_factory=_C.kernel_settings)
    _rest: _C.PrefixRest | None = None
    _has_rest: bool = True  # False once it is known to have none
    _layouts: dict[tuple[int, ...], list[Layout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = self.planned.plan
        self.differences = list(self.planned.differences)

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """Return the keys of its boundary tensors."""
        return frozenset(item.key for item in self.planned.boundary if item.leaf is None)

    @functools.cached_property
    def raw_leaves(self) -> frozenset[int]:
        """Return the leaves of the batch that the suffix reads, unchanged or on a device."""
        native = self.planned.native
        if native is None:
            return frozenset()
        placed = {
            self.lowering.inputs[item.leaf].leaf_index
            for item in self.planned.boundary
            if item.leaf is not None
        }
        return frozenset(placed.union(native.chosen.raw_leaves))

    @property
    def is_settled(self) -> bool:
        """Return whether its boundary tensors were compared, and its calls are no longer timed."""
        return self.used_count > 0 and not (self.priced and self.priced.wants_timed_calls)

    @property
    def rest(self) -> _C.PrefixRest | None:
        """Return the trainer's part for a worker with other kernels; None if there is no such part.

        Such a worker has run only the exact part of the prefix.
        """
        if self._rest is None and self._has_rest:
            constants = [constant.detach().clone() for constant in self.planned.prefix_constants]
            try:
                self._rest = _C.PrefixRest(self.planned.prefix, constants)
            except PenstockError:
                self._has_rest = False
        return self._rest

    def layouts(self, sizes: tuple[int, ...]) -> list[Layout]:
        """Return the layouts that eager gives the boundary tensors: kernels depend on them."""
        layouts = self._layouts.get(sizes)
        if layouts is None:
            if len(self._layouts) >= REMEMBERED_SIZES:
                self._layouts.clear()
            values = self.lowering.conditions.values(sizes)
            layouts = [item.layout(values) for item in self.planned.boundary]
            self._layouts[sizes] = layouts
        return layouts


@dataclass(slots=True)
class GraphCall:
    """One call of the graph with tensors of one batch."""

    handle: BatchHandle
    found: dict[int, Provenance]  # by input
    inputs: Sequence[Any]  # including inputs that a cut has added
    waiting: dict[int, LazyValue] = field(default_factory=dict)  # by input: still to be computed
    withheld: dict[int, LazyValue] = field(default_factory=dict)  # by input: still with a worker

    @property
    def pattern(self) -> Pattern:
        return tuple(
            (index, provenance.source, index in self.waiting)
            for index, provenance in self.found.items()
        )

    def recall(self, leaves: Set[int] | None = None, *, is_check: bool = False) -> None:
        """Fetch the inputs that stayed with a worker, or only the given leaves of them. Blocks.

        With `is_check`, the read is penstock's and does not count as the program's use of the leaf.
        """
        wanted = [
            index for index in self.withheld if leaves is None or self.found[index].source in leaves
        ]
        if wanted:
            if is_check and self.handle.withheld is not None:
                self.handle.withheld.counts_reads = False
            inputs = list(self.inputs)
            for index in wanted:
                inputs[index] = self.withheld.pop(index).materialise()
            self.inputs = inputs

    def with_added(self, added: Sequence[tuple[int, int]], followed: Set[int]) -> Sequence[Any]:
        """Return the inputs of a cut with `added` inputs and inputs derived by expressions."""
        return [
            *(
                self.waiting[index].materialise()
                if index in self.waiting and index not in followed
                else value
                for index, value in enumerate(self.inputs)
            ),
            *(self.found[index].input(position) for index, position in added),
        ]


def has_layouts(tensors: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> bool:
    return all(
        (tensor.dtype, tuple(tensor.shape), tensor.stride()) == layout
        for tensor, layout in zip(tensors, layouts, strict=True)
    )


@dataclass(frozen=True)
class DrawnPrefix:
    """A prefix that draws random numbers, in the trainer. Thread-compatible.

    The draws of such a prefix for a batch depend only on the batch's position in the stream. So the
    trainer can compute a result that no worker has sent, and compare a worker's result with one
    that it computes.
    """

    executor: Any
    seed: int
    lowering: Lowering

    @staticmethod
    def of(
        lowering: Lowering, prefix: str, constants: Sequence[torch.Tensor], seed: int
    ) -> DrawnPrefix:
        """`constants` are copied, as they are for workers."""
        copies = [constant.detach().clone() for constant in constants]
        executor = _C.Executor(_C.parse_graph(prefix), copies, allow_random=True)
        return DrawnPrefix(executor, seed, lowering)

    def run(self, inputs: Sequence[Any], handle: BatchHandle) -> list[torch.Tensor]:
        """Return the boundary tensors of the batch `handle`, given the inputs of a call.

        No generator changes. Raises PenstockError if an operator fails.
        """
        leaves = leaves_of(self.lowering, inputs, handle.leaf_count)
        seed = _C.seed_of_batch(self.seed, *handle.place)
        made: list[torch.Tensor] = self.executor.run(leaves, seed)
        return made


@dataclass(frozen=True, slots=True)
class IdSource:
    """The source of the ids of one lookup."""

    table: Any  # the parameter
    place: str | int | None  # the key of a boundary tensor, the number of a leaf, or None: unknown


@dataclass
class KnownIds:
    """The ids that a batch will look up in the embeddings of the model, as known from one cut.

    The cut has to fit the batch.
    """

    planned: PlannedCut
    sources: list[IdSource]
    _lowering: Lowering
    _leaves: tuple[tuple[int, int], ...]  # graph input, batch tensor
    _shapes: list[tuple[int | None, ...]]  # their shapes; None: any size
    _executor: _C.Executor | None = None

    @staticmethod
    def of(
        lowering: Lowering,
        planned: PlannedCut,
        inputs: Sequence[Any],
    ) -> KnownIds:
        """``inputs`` are the inputs of the graph on which the cut was planned."""
        leaves = tuple(
            (index, item.leaf_index)
            for index, item in enumerate(lowering.inputs)
            if item.kind == "leaf"
        )
        keys = {item.name: item.key for item in planned.boundary}

        makers = {name: op for op in lowering.recording.ops for name in op.outputs}

        def place(name: Name) -> str | int | None:
            if name in keys:
                return keys[name]
            index = lowering.input_names.get(name)
            if index is not None:
                item = lowering.inputs[index]
                return item.leaf_index if item.kind == "leaf" else None
            maker = makers.get(name)
            if maker is None or _operator(maker) not in _SAME_IDS:
                return None
            return place(maker.args[0])

        sources = [
            IdSource(inputs[lowering.input_names[op.args[0]]], place(op.args[1]))
            for op in lowering.recording.ops
            if _operator(op) in _LOOKUPS and op.args[0] in lowering.input_names
        ]
        shapes = [
            tuple(
                None if dim in lowering.inputs[index].dynamic_dims else size
                for dim, size in enumerate(inputs[index].shape)
            )
            for index, _ in leaves
        ]
        return KnownIds(planned, sources, lowering, leaves, shapes)

    @property
    def call(self) -> tuple[int, ...]:
        """Return the tensors of the batch that the model is called with."""
        return tuple(leaf_index for _, leaf_index in self._leaves)

    def fits(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether this cut fits a batch with these tensors, judging by the tensors alone."""
        if self._lowering.conditions.fixed_ints:
            return False  # it also depends on numbers that are not in a batch
        inputs: list[Any] = [None] * len(self._lowering.inputs)
        for (index, leaf_index), shape in zip(self._leaves, self._shapes, strict=True):
            if leaf_index >= len(leaves) or leaves[leaf_index].dim() != len(shape):
                return False
            inputs[index] = leaf = leaves[leaf_index]
            if any(
                size not in (None, is_size) for size, is_size in zip(shape, leaf.shape, strict=True)
            ):
                return False
        return self._lowering.conditions.hold(inputs)

    def ids(
        self, source: IdSource, leaves: Sequence[torch.Tensor], shipped: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        if isinstance(source.place, int):
            return leaves[source.place]
        if source.place is None or source.place in shipped:
            return shipped.get(source.place or "")
        return self._compute(leaves).get(source.place)

    def _compute(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that a worker would have sent, by key; none for random draws."""
        planned = self.planned
        if any(item.is_random for item in planned.boundary):
            return {}
        if self._executor is None:
            graph = _C.parse_graph(planned.prefix)
            self._executor = _C.Executor(graph, list(planned.prefix_constants))
        if self._executor.refusal(leaves) is not None:
            return {}
        with torch.inference_mode(False), torch.no_grad():
            made = self._executor.run(leaves)
        return {item.key: tensor for item, tensor in zip(planned.boundary, made, strict=True)}


def _operator(op: RecordedOp) -> str:
    return op.target.partition(".")[0]
