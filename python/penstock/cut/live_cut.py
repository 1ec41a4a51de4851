# SPDX-License-Identifier: Apache-2.0
"""One cut of a captured graph while it is in use, and one call of the graph.

A cut may draw random numbers (`DrawnPrefix`), and it tells the ids that a batch will look up in the
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

# The inputs that are of the batch, the kind of each, and whether it is still to be computed.
Pattern = tuple[tuple[int, int | Expression, bool], ...]
# A pattern, and the inputs that are followed by their expressions. It fixes how calls are numbered.
Variant = tuple[Pattern, frozenset[int]]
# A pattern, and the graph's own inputs apart from their values: calls that get one plan.
Signature = tuple[Any, ...]

# Operators whose first two arguments are a table and the ids that are looked up in it.
_LOOKUPS = ("aten::embedding", "aten::embedding_bag", "aten::_embedding_bag")
# Operators that leave the ids and their order as they are. EmbeddingBag flattens its input so.
_SAME_IDS = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::clone")


@dataclass
class LiveCut:
    """The state of a cut that is in use, and the code that it runs. Confined to the training
    thread.
    """

    lowering: Lowering
    variant: Variant
    added: list[tuple[int, int]]  # inputs beside the graph's own: see ExtendedGraph
    planned: PlannedCut
    suffix: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    constants: ConstantWatch | None = None
    drawn: DrawnPrefix | None = None  # where the prefix draws random numbers
    writes_inputs: bool = False  # to tensors that others may follow from
    mistrusts: int = 0  # of the context, when this cut was compared last
    differences: list[float] = field(init=False)  # of its boundary tensors, the largest seen
    used_count: int = 0
    unchecked_count: int = 0  # of these, since the last that was compared
    is_used: bool = True  # lately; see UnusedCuts
    former: LiveCut | None = None  # whose boundary tensors batches that are under way may carry
    signature: Signature = ()  # of the call that it was planned for
    priced: _C.PricedCut | None = None  # where it may be replaced by a cut of another price
    plan: Plan = field(init=False)  # as it is shown: with the price, once it is known
    unchecked: UncheckedBatches = field(default_factory=UncheckedBatches)
    verified: set[tuple[tuple[int, ...], int]] = field(default_factory=set)  # sizes, threads
    verified_makers: set[int] = field(default_factory=set)  # workers of which a batch was compared
    # Of the process, when it was planned: what workers compute follows from them.
    settings: str = field(default_factory=_C.kernel_settings)
    _rest: _C.PrefixRest | None = None
    _has_rest: bool = True  # as far as is known
    _layouts: dict[tuple[int, ...], list[Layout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = self.planned.plan
        self.differences = list(self.planned.differences)

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """Those of its boundary tensors."""
        return frozenset(item.key for item in self.planned.boundary if item.leaf is None)

    @functools.cached_property
    def raw_leaves(self) -> frozenset[int]:
        """The leaves of the batch that the suffix reads, as they came or on a device."""
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
        """Whether its boundary tensors were compared, and its calls are timed no more."""
        return self.used_count > 0 and not (self.priced and self.priced.wants_timed_calls)

    @property
    def rest(self) -> _C.PrefixRest | None:
        """The trainer's part where a worker's kernels are of another kind, so that it has run only
        the exact part of the prefix; None where there is no such part."""
        if self._rest is None and self._has_rest:
            constants = [constant.detach().clone() for constant in self.planned.prefix_constants]
            try:
                self._rest = _C.PrefixRest(self.planned.prefix, constants)
            except PenstockError:
                self._has_rest = False
        return self._rest

    def layouts(self, sizes: tuple[int, ...]) -> list[Layout]:
        """The layouts of the boundary tensors as eager makes them: kernels depend on them."""
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
    inputs: Sequence[Any]  # with those that a cut has added
    waiting: dict[int, LazyValue] = field(default_factory=dict)  # by input: still to be computed
    withheld: dict[int, LazyValue] = field(default_factory=dict)  # by input: still with a worker

    @property
    def pattern(self) -> Pattern:
        return tuple(
            (index, provenance.source, index in self.waiting)
            for index, provenance in self.found.items()
        )

    def recall(self, leaves: Set[int] | None = None, *, is_check: bool = False) -> None:
        """Has the inputs that stayed with a worker come, or those of them that are these leaves of
        the batch. Blocks. A check of ours is no read that says that the leaf is wanted."""
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
        """The inputs of a cut that has `added` some, and follows those inputs by expressions."""
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

    The draws of such a prefix for a batch follow from the batch's place in the stream and from
    nothing else. So the trainer can make a result that no worker has sent, and compare one that a
    worker has sent with its own.
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
        """The boundary tensors of the batch `handle`, given the inputs of a call. No generator
        moves. Raises PenstockError where an operator fails."""
        leaves = leaves_of(self.lowering, inputs, handle.leaf_count)
        seed = _C.seed_of_batch(self.seed, *handle.place)
        made: list[torch.Tensor] = self.executor.run(leaves, seed)
        return made


@dataclass(frozen=True, slots=True)
class IdSource:
    """Where the ids of one lookup are found."""

    table: Any  # the parameter
    place: str | int | None  # the key of a boundary tensor, the number of a leaf, or unknown


@dataclass
class KnownIds:
    """The ids that a batch will look up in the embeddings of the model, as far as one cut that fits
    it tells."""

    planned: PlannedCut
    sources: list[IdSource]
    _lowering: Lowering
    _leaves: tuple[tuple[int, int], ...]  # input of the graph, tensor of the batch
    _shapes: list[tuple[int | None, ...]]  # of these; None: any
    _executor: _C.Executor | None = None

    @staticmethod
    def of(
        lowering: Lowering,
        planned: PlannedCut,
        inputs: Sequence[Any],
    ) -> KnownIds:
        """``inputs`` are the graph's, on which the cut was planned."""
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
        """The tensors of the batch that the model is called with."""
        return tuple(leaf_index for _, leaf_index in self._leaves)

    def fits(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether this is the cut of a batch with these tensors, as far as they tell."""
        if self._lowering.conditions.fixed_ints:
            return False  # it also depends on numbers that are no batch's
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
        """The tensors that a worker would have sent, by key; nothing where they draw random
        numbers.
        """
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
