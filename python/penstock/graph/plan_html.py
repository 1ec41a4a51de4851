# SPDX-License-Identifier: Apache-2.0
"""A plan as a piece of HTML for a notebook.

It holds all that it needs. Text has the colour of the page, and grounds are translucent, so that it
is readable on light and on dark pages: a notebook's theme need not be that of the system, which a
media query would ask for. Styles stand at the elements, since notebooks remove style sheets from
documents that they do not trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from penstock.graph.plan_record import PlannedCall, PlanRecord
from penstock.graph.plan_table import NumberedReasons, milliseconds, notes, total_rows, verdict

OPEN_CALLS_MAX = 40  # a longer table is folded
_PLACE_COLOURS = {"worker": "46,160,67", "trainer": "210,120,30", "both": "128,128,128"}
_CELL = "padding:2px 10px;border:0;"
_NUMBER = f"{_CELL}text-align:right;font-variant-numeric:tabular-nums;"
_TEXT = f"{_CELL}text-align:left;"
_TITLES = ("operator", "runs in", "worker ms", "trainer ms", "bytes", "why")


def format_html(plan: PlanRecord) -> str:
    """The verdict, the calls, the reasons by their numbers, the costs of each way to cut."""
    if plan.refused is not None:
        return _whole([_verdict(f"nothing moves: {plan.refused}")])
    calls = [*plan.moved, *plan.kept]
    reasons = NumberedReasons(calls)
    is_open = ' open="open"' if len(calls) <= OPEN_CALLS_MAX else ""
    listed = "".join(f'<li style="margin:0">{escape(reason)}</li>' for reason in reasons.spoken())
    totals = total_rows(plan)
    return _whole(
        [
            _verdict(verdict(plan)),
            _table(totals[0], [_row(_cells(row)) for row in totals[1:]]),
            f"<details{is_open}><summary>{len(calls)} calls of the model, and where each runs"
            f"</summary>",
            _table(_TITLES, [_call_row(call, reasons.number_of(call)) for call in calls]),
            f'<ol style="margin:6px 0">{listed}</ol></details>',
            *(f'<p style="margin:4px 0;opacity:0.8">{escape(note)}</p>' for note in notes(plan)),
        ]
    )


def _whole(parts: Iterable[str]) -> str:
    return (
        '<div class="penstock-plan" style="overflow-x:auto;max-width:100%">'
        + "\n".join(parts)
        + "</div>"
    )


def _verdict(text: str) -> str:
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
