# SPDX-License-Identifier: Apache-2.0
"""What is moved, what stays, why, and what it costs: the answer of `explain` and of
`loader.plan`."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the model's forward (or several that write to the same memory)."""

    operator: str  # as the program says it: "interpolate at model.py:14"
    place: str  # "worker", "trainer", or "both" for what each side computes for itself
    reason: str
    worker_s: float  # per batch, where a worker runs it
    trainer_s: float  # per batch, where the trainer runs it; 0 for what cannot move


@dataclass(frozen=True, slots=True)
class Plan:
    """A cut with its prices; bytes and seconds are per batch.

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

    def __str__(self) -> str:
        if self.refused is not None:
            return f"nothing moves: {self.refused}"
        calls = [*self.moved, *self.kept]
        # A reason is a sentence and many calls share it, so the table refers to it by number.
        reasons = list(dict.fromkeys(call.reason for call in calls))
        rows = [("operator", "runs in", "worker ms", "trainer ms", "why")]
        rows += [
            (
                call.operator,
                call.place,
                f"{call.worker_s * 1e3:.3f}" if call.worker_s else "",
                f"{call.trainer_s * 1e3:.3f}" if call.trainer_s else "",
                f"[{reasons.index(call.reason) + 1}]",
            )
            for call in calls
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
            f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        lines.append("")
        for number, reason in enumerate(reasons, start=1):
            lines += textwrap.wrap(f"[{number}] {reason}", 96, subsequent_indent="    ")
        moved_count, kept_count = len(self.moved), len(self.kept)
        lines += [
            "",
            f"{moved_count} of {moved_count + kept_count} calls run in the workers, "
            f"{self.worker_s * 1e3:.3f} ms per batch;",
            f"what could move and stays costs the trainer {self.trainer_s * 1e3:.3f} ms",
            f"bytes per batch: {self.raw_bytes:,} raw, {self.boundary_bytes:,} with this plan, "
            f"{self.maximal_bytes:,} with everything moved that can",
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The same as one JSON object, field by field."""
        return json.dumps(dataclasses.asdict(self))


def joined(plans: Sequence[Plan]) -> Plan:
    """The plan of a model that runs as several graphs, from theirs, in order.

    What was given to more than one graph is counted for each.
    """
    if len(plans) == 1:
        return plans[0]
    return Plan(
        moved=tuple(call for plan in plans for call in plan.moved),
        kept=tuple(call for plan in plans for call in plan.kept),
        raw_bytes=max(plan.raw_bytes for plan in plans),
        maximal_bytes=sum(plan.maximal_bytes for plan in plans),
        boundary_bytes=sum(plan.boundary_bytes for plan in plans),
        worker_s=sum(plan.worker_s for plan in plans),
        trainer_s=sum(plan.trainer_s for plan in plans),
    )
