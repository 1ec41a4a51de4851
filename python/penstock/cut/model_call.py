# SPDX-License-Identifier: Apache-2.0
"""The facts about one call of an offloaded model while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.graph.plan import Plan
from penstock.tracking.batch_origin import BatchHandle


class UsedCut(NamedTuple):
    """The cut of one graph that ran: which leaves the trainer reads, and the boundary tensors that
    stand for the others."""

    raw_leaves: frozenset[int]
    keys: frozenset[str]  # empty where nothing moves
    is_settled: bool  # it was compared, and is not being timed


@dataclass
class ModelCall:
    """One call, which may run several captured graphs. Confined to the training thread."""

    is_foreign: bool = True  # no tensor of the loader was seen so far
    has_written: bool = False  # a tensor of the batch was given that was written to before
    has_stranger: bool = False  # the program may have made an input of the batch
    follows_calls: bool = False  # it has, and it is known how
    has_planned: bool = False
    plans: list[Plan] = field(default_factory=list)  # of the graphs that ran
    cuts: list[UsedCut] = field(default_factory=list)  # the same
    _batch: weakref.ref[BatchHandle] | None = None  # once a graph has seen it
    _graph_count: int = 0

    def note_batch(self, handle: BatchHandle) -> None:
        self._batch = weakref.ref(handle)

    @property
    def batch(self) -> BatchHandle | None:
        return None if self._batch is None else self._batch()

    def note_inputs(
        self, knows_batch: bool, has_stranger: Callable[[], bool], *, follows_calls: bool
    ) -> None:
        """Notes the inputs of a graph. Later graphs of a call have results of the earlier ones, so
        only the first tells how the program made its inputs; `has_stranger` is asked for it
        alone."""
        if knows_batch:
            self.is_foreign = False
        self.follows_calls |= follows_calls
        if self._graph_count == 0:
            self.has_stranger = has_stranger()
        self._graph_count += 1

    @property
    def moves(self) -> bool:
        """Whether a graph that ran has work that moved to the workers."""
        return any(plan.moved for plan in self.plans)
