# SPDX-License-Identifier: Apache-2.0
"""The plan that `explain` and `loader.plan` return, with its forms for people and programs."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph.plan_picture import (
    format_dot,
    format_notebook,
    format_page,
    format_svg,
    picture_json,
)
from penstock.graph.plan_record import (
    CutTotals,
    PlannedCall,
    PlannedEdge,
    PlanRecord,
    RunningPrice,
)
from penstock.graph.plan_text import format_summary, format_table

__all__ = ["CutTotals", "Plan", "PlannedCall", "PlannedEdge", "RunningPrice", "joined"]

SCHEMA = "penstock.plan/1"


@dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """A cut of a model and its costs. Bytes and seconds are per batch.

    ``str()`` of it is a summary of about ten lines; `table` lists every call.

    Attributes:
        moved (tuple[PlannedCall, ...]): Calls that run in the workers.
        kept (tuple[PlannedCall, ...]): Calls that run in the trainer, or on both sides.
        raw_bytes (int): Bytes of the batch as the dataset makes it.
        maximal_bytes (int): Bytes at the boundary if every call that can move does.
        boundary_bytes (int): Bytes at the boundary that the trainer reads with this plan.
        worker_s (float): Seconds of a worker for the moved calls.
        trainer_s (float): Seconds of the trainer for the calls that could move and do not.
        refused (str | None): The reason why the whole model stays in the trainer, as one sentence;
            None if it does not.
        totals (tuple[CutTotals, ...]): Costs of no cut, of the maximal cut and of this plan, in
            this order; also of this plan without ``cut_tolerance``, if that moves a call.
        edges (tuple[PlannedEdge, ...]): Tensors passed between calls, without parameters and
            constants.
        link_bytes_per_s (float | None): Rate of the link to a pool's workers when the plan was
            made, in bytes per second; None for workers on this machine.
        copy_bytes_per_s (float | None): Rate of copies from pinned memory to the device on which
            the program has its batches, in bytes per second; None without a device.
        priced (RunningPrice | None): Price by measurements of the running loader; None if only the
            calibration on one batch is known.
        workers_apart (tuple[str, ...]): Pool workers that run only the part of the plan that is
            exact on every CPU, each with the reason.
        sample (str): How the samples with images are made: the text of a
            :class:`penstock.SamplePlan`, or in a loader's plan, how to see one. Empty for a dataset
            in which penstock sees no images.

    See Also:
        :func:`penstock.explain` and :attr:`penstock.DataLoader.plan` return a plan.

    Example::

        plan = penstock.explain(model, next(iter(loader)))
        print(plan)
        pathlib.Path("plan.html").write_text(plan.to_html())
    """

    def __str__(self) -> str:
        return format_summary(self)

    def _repr_html_(self) -> str:
        """Return the summary and the table for a notebook."""
        return format_notebook(self)

    def table(self) -> str:
        """Return a line for each call, the reasons, and the costs of each way to cut.

        Returns:
            str: Text of 100 columns.
        """
        return format_table(self)

    def to_json(self) -> str:
        """Return the plan as one JSON object with a key per field, and ``schema``.

        Returns:
            str: JSON text.
        """
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)})

    @property
    def moved_calls(self) -> frozenset[str]:
        """Operators of the calls that move, as the program writes them."""
        return frozenset(call.operator for call in self.moved)

    def told(self, bytes_max: int) -> str:
        """Return the picture as one JSON object of limited size, for a pool's dashboard.

        Args:
            bytes_max (int): Limit on the size of the text in bytes, 4096 or more.

        Returns:
            str: JSON text. Calls that do not fit are left out.
        """
        return picture_json(self, bytes_max)

    def to_html(self) -> str:
        """Return the plan as a picture for a browser: one HTML file that loads no other.

        Each call is a box on the side where it runs; a click shows the reason. In a plan of more
        than 40 calls, consecutive calls that have to stay share a box.

        Returns:
            str: HTML text.
        """
        return format_page(self)

    def to_dot(self) -> str:
        """Return the plan as a graph in Graphviz's language.

        The calls of the workers and of the trainer are in one box each; the edges are the tensors
        between them, with their bytes.

        Returns:
            str: DOT text.

        Example::

            penstock explain --format dot train.py | dot -Tpdf -o plan.pdf
        """
        return format_dot(self)

    def to_svg(self) -> str:
        """Return the graph of `to_dot` as a picture drawn by Graphviz. Deprecated: use `to_html`.

        Returns:
            str: SVG text.

        Raises:
            RuntimeError: If Graphviz is not installed.
        """
        warnings.warn(
            "Plan.to_svg() is deprecated; use to_html(), or to_dot() with Graphviz",
            DeprecationWarning,
            stacklevel=2,
        )
        return format_svg(self)


def joined(plans: Sequence[Plan]) -> Plan:
    """Return the plan of a model that runs as several graphs, from their plans in order.

    A tensor that is passed to several graphs is counted for each of them.
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
    """Return the costs of all graphs by cut.

    A graph in which `cut_tolerance` moves no call has the same cut without it.
    """
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
    """Return the newest price: a measured step already includes all graphs."""
    if not prices:
        return None
    newest = max(prices, key=lambda price: price.times)
    return dataclasses.replace(
        newest,
        changes=sum(price.changes for price in prices),
        is_held=all(price.is_held for price in prices),
    )


def _renumbered(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans with call numbers that are unique among all of them."""
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
