# SPDX-License-Identifier: Apache-2.0
"""The plan that `explain` and `loader.plan` return, with its forms for notebooks and programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from penstock.graph.plan_record import (
    CutTotals,
    NumberedReasons,
    PlannedCall,
    PlannedEdge,
    PlanRecord,
    RunningPrice,
    format_plan,
    milliseconds,
    notes,
    total_rows,
    verdict,
)
from penstock.graph.plan_svg import format_svg

__all__ = ["CutTotals", "Plan", "PlannedCall", "PlannedEdge", "RunningPrice", "joined"]

_TEXT_MAX = 200  # characters of an operator or a reason
_APART_MAX = 16  # worker count

# Calls on "both" sides are drawn outside the two boxes: they cause no tensor to cross.
_CLUSTERS = (("worker", "workers"), ("trainer", "trainer"))

OPEN_CALLS_MAX = 40  # longer tables are folded
_PLACE_COLOURS = {"worker": "46,160,67", "trainer": "210,120,30", "both": "128,128,128"}
_CELL = "padding:2px 10px;border:0;"
_NUMBER = f"{_CELL}text-align:right;font-variant-numeric:tabular-nums;"
_TEXT = f"{_CELL}text-align:left;"
_CALL_TITLES = ("operator", "runs in", "worker ms", "trainer ms", "bytes", "why")


@dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """A cut of a model and its costs. Bytes and seconds are per batch.

    ``str()`` of it is a table of the calls and the reasons; notebooks show it as HTML.

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

    See Also:
        :func:`penstock.explain` and :attr:`penstock.DataLoader.plan` return a plan.

    Example::

        plan = penstock.explain(model, next(iter(loader)))
        print(plan)
        pathlib.Path("plan.svg").write_text(plan.to_svg())
    """

    def __str__(self) -> str:
        return format_plan(self)

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return format_html(self)

    def to_json(self) -> str:
        """Return the plan as one JSON object with a key per field.

        Returns:
            str: JSON text.
        """
        return json.dumps(dataclasses.asdict(self))

    @property
    def moved_calls(self) -> frozenset[str]:
        """Operators of the calls that move, as the program writes them."""
        return frozenset(call.operator for call in self.moved)

    def told(self, bytes_max: int) -> str:
        """Return the plan as one JSON object of limited size, for a pool's dashboard.

        Args:
            bytes_max (int): Limit on the size of the text in bytes, 4096 or more.

        Returns:
            str: JSON text. Calls that do not fit are left out.
        """
        return plan_for_dashboard(self, bytes_max)

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
        """Return the plan as a picture for a browser, light or dark as the reader's system.

        In a large plan several calls share a box. Hovering over a call shows where it runs and why.

        Returns:
            str: SVG text.
        """
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


def plan_for_dashboard(plan: PlanRecord, bytes_max: int) -> str:
    """Return a plan as it is sent to a pool's controller, for the pool's users.

    The result is one JSON object of at most ``bytes_max`` bytes, which must be at least 4,096. It
    has ``verdict``, a sentence; ``refused``, or null; ``reasons``, a list of sentences; ``calls``,
    each with ``index``, ``operator``, ``place``, ``reason`` (an index into that list), ``seconds``
    a batch where it runs, ``bytes`` that it makes and the ``device`` that the program runs it on,
    or null for the CPU; ``edges``, each with ``source``, ``target``, ``bytes`` and ``leaf`` as in
    `PlannedEdge`; ``totals`` and ``priced`` as in `PlanRecord`; ``calls_left_out``, the number of
    calls that did not fit; and ``workers_apart`` as in `PlanRecord`, at most 16.
    """
    calls = sorted((*plan.moved, *plan.kept), key=lambda call: call.index)
    count = len(calls)
    while True:
        text = json.dumps(_dashboard_fields(plan, calls[:count], len(calls) - count))
        if len(text.encode()) <= bytes_max or count == 0:
            return text
        count = min(count - 1, count * bytes_max // len(text.encode()))


def _dashboard_fields(plan: PlanRecord, calls: list[PlannedCall], left_out: int) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    shown = []
    for call in calls:
        number = reasons.setdefault(call.reason[:_TEXT_MAX], len(reasons))
        seconds = call.worker_s if call.place == "worker" else call.trainer_s
        shown.append(
            {
                "index": call.index,
                "operator": call.operator[:_TEXT_MAX],
                "place": call.place,
                "reason": number,
                "seconds": seconds,
                "bytes": call.made_bytes,
                "device": call.device,
            }
        )
    known = {call.index for call in calls} | {None}
    return {
        "verdict": verdict(plan) if plan.refused is None else f"no call moves: {plan.refused}",
        "refused": plan.refused,
        "raw_bytes": plan.raw_bytes,
        "boundary_bytes": plan.boundary_bytes,
        "link_bytes_per_s": plan.link_bytes_per_s,
        "reasons": list(reasons),
        "calls": shown,
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "bytes": edge.tensor_bytes,
                "leaf": edge.leaf,
            }
            for edge in plan.edges
            if edge.source in known and edge.target in known
        ],
        "totals": [dataclasses.asdict(total) for total in plan.totals],
        "priced": None if plan.priced is None else dataclasses.asdict(plan.priced),
        "calls_left_out": left_out,
        "workers_apart": [text[:_TEXT_MAX] for text in plan.workers_apart[:_APART_MAX]],
    }


def format_dot(plan: PlanRecord) -> str:
    """Return a plan as a graph in Graphviz's language.

    Calls are nodes with their time, tensors are edges with their bytes; edges that cross the cut
    are bold. A plan that was refused is one node with the reason.
    """
    lines = ["digraph plan {", "  node [shape=box];"]
    if plan.refused is not None:
        lines += [
            f"  {_quote('refused')} [label={_quote(f'no call moves: {plan.refused}')}];",
            "}",
        ]
        return "\n".join(lines)
    calls = [*plan.moved, *plan.kept]
    totals = {"worker": plan.worker_s, "trainer": plan.trainer_s}
    for place, name in _CLUSTERS:
        title = f"{name}, {totals[place] * 1e3:.3f} ms per batch"
        if place == "trainer":
            title += " on movable calls"
        lines += [f"  subgraph {_quote(f'cluster_{place}')} {{", f"    label={_quote(title)};"]
        lines += [f"    {_dot_node(call)}" for call in calls if call.place == place]
        lines.append("  }")
    lines += [f"  {_dot_node(call)}" for call in calls if call.place == "both"]
    for leaf in sorted({edge.leaf for edge in plan.edges if edge.leaf is not None}):
        label = _quote(f"tensor {leaf} of the batch")
        lines.append(f"  {_quote(f'leaf {leaf}')} [shape=ellipse, label={label}];")
    if any(edge.target is None for edge in plan.edges):
        lines.append(f"  {_quote('result')} [shape=ellipse, label={_quote('result of forward')}];")
    moved = {call.index for call in plan.moved}
    staying = {call.index for call in plan.kept if call.place == "trainer"}
    for edge in plan.edges:
        crosses = edge.source in moved and (edge.target is None or edge.target in staying)
        lines.append(f"  {_dot_edge(edge, crosses)}")
    return "\n".join([*lines, "}"])


def _dot_node(call: PlannedCall) -> str:
    what, separator, where = call.operator.rpartition(" at ")
    title = f"{what}\n{where}" if separator else where
    seconds = call.worker_s if call.place == "worker" else call.trainer_s
    if seconds:
        title += f"\n{seconds * 1e3:.3f} ms"
    style = ", style=dashed" if call.place == "both" else ""
    attributes = f"label={_quote(title)}, tooltip={_quote(call.reason)}{style}"
    return f"{_quote(f'call {call.index}')} [{attributes}];"


def _dot_edge(edge: PlannedEdge, crosses: bool) -> str:
    source = f"call {edge.source}" if edge.source is not None else f"leaf {edge.leaf}"
    target = f"call {edge.target}" if edge.target is not None else "result"
    label = f"label={_quote(f'{edge.tensor_bytes:,}')}"
    return f"{_quote(source)} -> {_quote(target)} [{label}{', style=bold' if crosses else ''}];"


def _quote(text: str) -> str:
    """Return a string literal of the language.

    A backslash in a label starts an escape (`\\N` is the node's name), so backslashes of the text
    are doubled.
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def format_html(plan: PlanRecord) -> str:
    """Return a plan as HTML for a notebook: verdict, calls, numbered reasons, costs of each cut.

    The HTML is self-contained. Text has the colour of the page, and backgrounds are translucent, so
    that it is readable on light and on dark pages: a notebook's theme may differ from the system's
    theme, which a media query would return. Styles are inline, since notebooks remove style sheets
    from untrusted documents.
    """
    if plan.refused is not None:
        return _html_whole([_html_verdict(f"no call moves: {plan.refused}")])
    calls = [*plan.moved, *plan.kept]
    reasons = NumberedReasons(calls)
    is_open = ' open="open"' if len(calls) <= OPEN_CALLS_MAX else ""
    listed = "".join(
        f'<li style="margin:0">{escape(reason)}</li>' for reason in reasons.sentences()
    )
    totals = total_rows(plan)
    return _html_whole(
        [
            _html_verdict(verdict(plan)),
            _table(totals[0], [_row(_cells(row)) for row in totals[1:]]),
            f"<details{is_open}><summary>{len(calls)} calls of the model and where they run"
            f"</summary>",
            _table(_CALL_TITLES, [_call_row(call, reasons.number_of(call)) for call in calls]),
            f'<ol style="margin:6px 0">{listed}</ol></details>',
            *(f'<p style="margin:4px 0;opacity:0.8">{escape(note)}</p>' for note in notes(plan)),
        ]
    )


def _html_whole(parts: Iterable[str]) -> str:
    return (
        '<div class="penstock-plan" style="overflow-x:auto;max-width:100%">'
        + "\n".join(parts)
        + "</div>"
    )


def _html_verdict(text: str) -> str:
    return f'<p style="margin:4px 0"><strong>{escape(text)}</strong></p>'


def _table(titles: Sequence[str], rows: Iterable[str]) -> str:
    heads = "".join(
        f'<th style="{_TEXT if title in ("operator", "runs in", "why", "per batch") else _NUMBER}">'
        f"{escape(title)}</th>"
        for title in titles
    )
    return (
        '<table style="border-collapse:collapse;margin:6px 0;color:inherit;font-size:inherit">'
        f'<thead><tr style="border-bottom:1px solid rgba(128,128,128,0.5)">{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _call_row(call: PlannedCall, reason_number: int) -> str:
    colour = _PLACE_COLOURS[call.place]
    place = (
        f'<span style="background:rgba({colour},0.25);border-radius:3px;padding:0 5px">'
        f"{escape(call.place)}</span>"
    )
    figures = (
        milliseconds(call.worker_s),
        milliseconds(call.trainer_s),
        f"{call.made_bytes:,}" if call.made_bytes else "",
    )
    return _row(
        [
            f'<td style="{_TEXT}"><code style="background:none;color:inherit">'
            f"{escape(call.operator)}</code></td>",
            f'<td style="{_TEXT}">{place}</td>',
            *(f'<td style="{_NUMBER}">{figure}</td>' for figure in figures),
            f'<td style="{_TEXT}" title="{escape(call.reason)}">{reason_number}</td>',
        ]
    )


def _cells(row: Sequence[str]) -> list[str]:
    first, *rest = row
    return [
        f'<td style="{_TEXT}">{escape(first)}</td>',
        *(f'<td style="{_NUMBER}">{escape(figure)}</td>' for figure in rest),
    ]


def _row(cells: Iterable[str]) -> str:
    return f'<tr style="background:none">{"".join(cells)}</tr>'
