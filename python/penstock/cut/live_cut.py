# SPDX-License-Identifier: Apache-2.0
"""One cut of a captured graph while it is in use, and one call of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock import _C
from penstock.cut.drawn_prefix import DrawnPrefix
from penstock.errors import PenstockError
from penstock.graph.constants import ConstantWatch
from penstock.graph.expression import Expression
from penstock.graph.lowering import Lowering
from penstock.graph.plan import Plan
from penstock.graph.planning import Layout, PlannedCut, UncheckedBatches
from penstock.graph.sizes import REMEMBERED_SIZES
from penstock.tracking.batch_origin import BatchHandle, Provenance
from penstock.tracking.lazy_value import LazyValue

# The inputs that are of the batch, the kind of each, and whether it is still to be computed.
Pattern = tuple[tuple[int, int | Expression, bool], ...]
# A pattern, and the inputs that are followed by their expressions. It fixes how calls are numbered.
Variant = tuple[Pattern, frozenset[int]]
# A pattern, and the graph's own inputs apart from their values: calls that get one plan.
Signature = tuple[Any, ...]


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
    is_used: bool = True  # lately; see unused_cuts.py
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
