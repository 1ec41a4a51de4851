# SPDX-License-Identifier: Apache-2.0
"""A plan as a pool's controller is told it, for the people who look at the pool.

One JSON object of a bounded size: ``verdict``, a sentence; ``refused``, or null; ``reasons``, a
list of sentences; ``calls``, each with ``index``, ``operator``, ``place``, ``reason`` (a number of
that list), ``seconds`` a batch where it runs, ``bytes`` that it makes and the ``device`` that the
program runs it on, or null for the CPU; ``edges``, each with ``source``, ``target``, ``bytes`` and
``leaf`` as in `PlannedEdge`; ``totals`` and ``priced`` as in `PlanRecord`; ``calls_left_out``, the
number of calls that did not fit; and ``workers_apart`` as in `PlanRecord`, at most 16.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from penstock.graph.plan_record import PlannedCall, PlanRecord
from penstock.graph.plan_table import verdict

_TEXT_MAX = 200  # characters of an operator or a reason
_APART_MAX = 16  # workers


def told_plan(plan: PlanRecord, bytes_max: int) -> str:
    """The plan in ``bytes_max`` bytes at most, of which it needs 4,096."""
    calls = sorted((*plan.moved, *plan.kept), key=lambda call: call.index)
    count = len(calls)
    while True:
        text = json.dumps(_fields(plan, calls[:count], len(calls) - count))
        if len(text.encode()) <= bytes_max or count == 0:
            return text
        count = min(count - 1, count * bytes_max // len(text.encode()))


def _fields(plan: PlanRecord, calls: list[PlannedCall], left_out: int) -> dict[str, Any]:
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
        "verdict": verdict(plan) if plan.refused is None else f"nothing moves: {plan.refused}",
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
