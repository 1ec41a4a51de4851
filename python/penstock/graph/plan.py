# SPDX-License-Identifier: Apache-2.0
"""The calls that move and those that stay, the reasons and the costs: the answer of `explain` and
of `loader.plan`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph.plan_dot import format_dot
from penstock.graph.plan_html import format_html
from penstock.graph.plan_record import (
    CutTotals,
    PlannedCall,
    PlannedEdge,
    PlanRecord,
    RunningPrice,
)
from penstock.graph.plan_svg import format_svg
from penstock.graph.plan_table import format_plan
from penstock.graph.plan_told import told_plan

__all__ = ["CutTotals", "Plan", "PlannedCall", "PlannedEdge", "RunningPrice", "joined"]


@dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """A cut with its prices; bytes and seconds are per batch.

    `str(plan)` is a table for people, which notebooks show as one of HTML. `to_json()` has all of
    it, `to_svg()` is a picture.
    `refused` is None, or the one sentence that says why the whole model stays in the trainer.
    """

    def __str__(self) -> str:
        return format_plan(self)

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return format_html(self)

    def to_json(self) -> str:
        """The plan as one JSON object, field by field under the fields' names."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def moved_calls(self) -> frozenset[str]:
        """The calls that move, as the program says them."""
        return frozenset(call.operator for call in self.moved)

    def told(self, bytes_max: int) -> str:
        """The plan as one JSON object of at most ``bytes_max`` bytes, for a pool's dashboard."""
        return told_plan(self, bytes_max)

    def to_dot(self) -> str:
        """The plan as a graph in the language of Graphviz: the calls of the workers and of the
        trainer in a box each, the tensors between them as edges with their bytes.

            penstock explain --format dot train.py | dot -Tpdf -o plan.pdf
        """
        return format_dot(self)

    def to_svg(self) -> str:
        """The plan as a picture for a browser, light or dark as the reader has it. Of a large plan
        several calls share a box; where a call runs and why is shown when the pointer rests on
        it."""
        return format_svg(self)


def joined(plans: Sequence[Plan]) -> Plan:
    """The plan of a model that runs as several graphs, from theirs, in order.

    A tensor that is given to more than one graph is counted for each.
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
        totals=_joined_totals(plans),
        edges=tuple(edge for plan in plans for edge in plan.edges),
        link_bytes_per_s=plans[0].link_bytes_per_s,
        copy_bytes_per_s=next(
            (plan.copy_bytes_per_s for plan in plans if plan.copy_bytes_per_s is not None), None
        ),
        priced=_joined_prices([plan.priced for plan in plans if plan.priced is not None]),
    )


def _joined_totals(plans: Sequence[Plan]) -> tuple[CutTotals, ...]:
    """The costs of all graphs by cut; a graph of which nothing moves by `cut_tolerance` is cut the
    same without it."""
    of_graphs = [{total.cut: total for total in plan.totals} for plan in plans if plan.totals]
    return tuple(
        CutTotals(
            cut,
            sum(total.worker_s for total in same),
            sum(total.trainer_s for total in same),
            sum(total.boundary_bytes for total in same),
            sum(total.sent_bytes for total in same),
        )
        for cut in dict.fromkeys(cut for totals in of_graphs for cut in totals)
        for same in [[totals[cut if cut in totals else "chosen"] for totals in of_graphs]]
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
