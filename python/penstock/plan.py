# SPDX-License-Identifier: Apache-2.0
"""What is moved, what stays, why, and what it costs: the answer of `explain` and of
`loader.plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the model's forward (or several that write to the same memory)."""

    index: int  # by which edges name it; calls are numbered in the order of the program
    operator: str  # as the program says it: "interpolate at model.py:14"
    place: str  # "worker", "trainer", or "both" for what each side computes for itself
    reason: str
    worker_s: float  # per batch, where a worker runs it
    trainer_s: float  # per batch, where the trainer runs it; 0 for what cannot move
    made_bytes: int  # what it allocates per batch and other calls read; a view makes none


@dataclass(frozen=True, slots=True)
class PlannedEdge:
    """Tensors that one call hands to another; parameters and constants are left out."""

    source: int | None  # `index` of the call that makes them; None: they come with the batch
    target: int | None  # `index` of the call that reads them; None: forward returns them
    tensor_bytes: int  # per batch, memory that tensors share counted once
    leaf: int | None  # which tensor of the batch, counted from 0, where `source` is None


@dataclass(frozen=True, slots=True)
class CutTotals:
    """What one way to cut costs per batch, by the same measurement as the others."""

    cut: Literal["none", "maximal", "chosen"]
    worker_s: float  # a worker's seconds
    trainer_s: float  # the trainer's seconds on what could move and stays
    boundary_bytes: int  # what the trainer reads: of the workers' results, and of the raw batch


@dataclass(frozen=True, slots=True)
class RunningPrice:
    """What a step takes with a plan, priced by what was measured while the loader ran.

    Seconds are per batch. `step_s` is that of the slowest side: the trainer, the workers, who share
    the batches, or the CPUs that all of them share.
    """

    times: int  # how often the plan was priced so
    changes: int  # and how often it was changed for it
    trainer_s: float  # the trainer at work, all of a step included
    worker_s: float  # a worker at work, the dataset included
    worker_count: int
    step_s: float
    is_held: bool  # a change made steps longer and was taken back: no other until loads shift


@dataclass(frozen=True, slots=True)
class Plan:
    """A cut with its prices; bytes and seconds are per batch.

    `str(plan)` is a table for people, `to_json()` has all of it, `to_dot()` is a picture.
    `refused` is None, or the one sentence that says why the whole model stays in the trainer.
    """

    moved: tuple[PlannedCall, ...] = ()
    kept: tuple[PlannedCall, ...] = ()
    raw_bytes: int = 0  # the batch as the dataset makes it
    maximal_bytes: int = 0  # the boundary when everything that can move does
    boundary_bytes: int = 0  # what the trainer reads of it with this plan
    worker_s: float = 0.0  # a worker's seconds per batch
    trainer_s: float = 0.0  # the trainer's seconds per batch on what could move and stays
    refused: str | None = None
    totals: tuple[CutTotals, ...] = ()  # of no cut, the maximal cut and this one, in this order
    edges: tuple[PlannedEdge, ...] = ()
    priced: RunningPrice | None = None  # None: by the calibration on one batch alone

    def __str__(self) -> str:
        from penstock.plan_table import format_plan

        return format_plan(self)

    def to_json(self) -> str:
        """The same as one JSON object, field by field under the fields' names."""
        return json.dumps(dataclasses.asdict(self))

    def to_dot(self) -> str:
        """The same as a graph in the language of Graphviz: the calls of the workers and of the
        trainer in a box each, the tensors between them as edges with their bytes.

            penstock explain --format dot train.py | dot -Tsvg -o plan.svg
        """
        from penstock.plan_dot import format_dot

        return format_dot(self)


def joined(plans: Sequence[Plan]) -> Plan:
    """The plan of a model that runs as several graphs, from theirs, in order.

    What is given to more than one graph is counted for each.
    """
    if len(plans) == 1:
        return plans[0]
    plans = _renumbered(plans)
    return Plan(
        moved=tuple(call for plan in plans for call in plan.moved),
        kept=tuple(call for plan in plans for call in plan.kept),
        raw_bytes=max(plan.raw_bytes for plan in plans),
        maximal_bytes=sum(plan.maximal_bytes for plan in plans),
        boundary_bytes=sum(plan.boundary_bytes for plan in plans),
        worker_s=sum(plan.worker_s for plan in plans),
        trainer_s=sum(plan.trainer_s for plan in plans),
        totals=tuple(
            CutTotals(
                same[0].cut,
                sum(total.worker_s for total in same),
                sum(total.trainer_s for total in same),
                sum(total.boundary_bytes for total in same),
            )
            for same in zip(*(plan.totals for plan in plans), strict=True)
        ),
        edges=tuple(edge for plan in plans for edge in plan.edges),
        priced=_joined_prices([plan.priced for plan in plans if plan.priced is not None]),
    )


def _joined_prices(prices: Sequence[RunningPrice]) -> RunningPrice | None:
    """A step is that of all graphs already, so the newest price holds."""
    if not prices:
        return None
    newest = max(prices, key=lambda price: price.times)
    return dataclasses.replace(
        newest,
        changes=sum(price.changes for price in prices),
        is_held=all(price.is_held for price in prices),
    )


def _renumbered(plans: Sequence[Plan]) -> list[Plan]:
    """The plans with calls that have numbers of their own."""
    renumbered: list[Plan] = []
    first = 0

    def number(index: int | None) -> int | None:
        return None if index is None else first + index

    for plan in plans:
        calls = (*plan.moved, *plan.kept)
        renumbered.append(
            dataclasses.replace(
                plan,
                moved=tuple(dataclasses.replace(c, index=first + c.index) for c in plan.moved),
                kept=tuple(dataclasses.replace(c, index=first + c.index) for c in plan.kept),
                edges=tuple(
                    dataclasses.replace(e, source=number(e.source), target=number(e.target))
                    for e in plan.edges
                ),
            )
        )
        first += 1 + max((call.index for call in calls), default=0)
    return renumbered
