# SPDX-License-Identifier: Apache-2.0
"""The record of a plan, and its text for a terminal of 100 columns.

The record has the calls that move, the calls that stay, the reasons, and the costs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

COLUMNS = 100
# The width that the other columns leave, with bytes below a gigabyte.
OPERATOR_CHARACTERS_MAX = 48

# Reasons that differ by a name alone, of which a deep model has one for each parameter.
KINDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"it reads \S+, which training changes",
        r".* writes its operand in place",
        r"%\w+ is memory that changes: ",
        r"it depends on a value that stays: ",
    )
)
_READ = re.compile(r"it reads (\S+), which training changes")
NAMES_MAX = 6  # of parameters in a line of the table
CUT_NAMES = {
    "none": "no cut",
    "maximal": "everything that can move",
    "chosen": "this plan",
    "exact": "without cut_tolerance",
}


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the model's forward (or several that write to the same memory)."""

    index: int  # by which edges name it; calls are numbered in the order of the program
    operator: str  # as the program says it: "interpolate at model.py:14"
    place: str  # "worker", "trainer", or "both" for values that each side computes for itself
    reason: str
    worker_s: float  # per batch, where a worker runs it
    # Per batch, where the trainer runs it, on `device` by that device's events; 0 for calls that
    # cannot move.
    trainer_s: float
    made_bytes: int  # memory that it allocates per batch and other calls read; a view makes none
    # How far results that follow from it were from the device's own at most, as `cut_tolerance`
    # counts; None where it does not move by that.
    largest_difference: float | None = None
    device: str | None = None  # where the program has its results, if not on the CPU


@dataclass(frozen=True, slots=True)
class PlannedEdge:
    """Tensors that one call hands to another; parameters and constants are left out."""

    source: int | None  # `index` of the call that makes them; None: they come with the batch
    target: int | None  # `index` of the call that reads them; None: forward returns them
    tensor_bytes: int  # per batch, memory that tensors share counted once
    leaf: int | None  # which tensor of the batch, counted from 0, where `source` is None


@dataclass(frozen=True, slots=True)
class CutTotals:
    """The costs per batch of one way to cut, by the same measurement as the others."""

    cut: Literal["none", "maximal", "chosen", "exact"]
    worker_s: float  # a worker's seconds
    trainer_s: float  # the trainer's seconds on calls that could move and stay
    # Bytes that the trainer reads: of the workers' results, and of the raw batch.
    boundary_bytes: int
    # Bytes that a pool's workers send: the same, or of the whole raw batch where all of it crosses.
    # Tensors that the model is not given are not counted.
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RunningPrice:
    """How long a step takes with a plan, priced by measurements of the running loader.

    Seconds are per batch. `step_s` is that of the slowest side: the trainer, the workers, who share
    the batches, the link to a pool's workers or to the trainer's device, or the CPUs that all of
    them share.
    """

    times: int  # how often the plan was priced so
    changes: int  # and how often it was changed for it
    trainer_s: float  # the trainer at work, all of a step included
    worker_s: float  # a worker at work, the dataset included
    worker_count: int
    link_s: float  # the bytes of a batch on their way from a pool's workers, or to a device
    step_s: float
    is_held: bool  # a change made steps longer and was taken back: no other until loads shift


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A cut with its prices; bytes and seconds are per batch.

    `refused` is None, or the one sentence that says why the whole model stays in the trainer.
    """

    moved: tuple[PlannedCall, ...] = ()
    kept: tuple[PlannedCall, ...] = ()
    raw_bytes: int = 0  # the batch as the dataset makes it
    maximal_bytes: int = 0  # the boundary when everything that can move does
    boundary_bytes: int = 0  # bytes of it that the trainer reads with this plan
    worker_s: float = 0.0  # a worker's seconds per batch
    trainer_s: float = 0.0  # the trainer's seconds per batch on calls that could move and stay
    refused: str | None = None
    # Of no cut, the maximal cut and this one, in this order; where `cut_tolerance` moves something,
    # of what this one would be without it, too.
    totals: tuple[CutTotals, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    # The link to a pool's workers, when the plan was made; None in one machine.
    link_bytes_per_s: float | None = None
    # From pinned memory to the device that the program has its batches on; None without one.
    copy_bytes_per_s: float | None = None
    priced: RunningPrice | None = None  # None: by the calibration on one batch alone
    # Workers of a pool that run only the part of it that is exact on every CPU, and why.
    workers_apart: tuple[str, ...] = ()


def format_plan(plan: PlanRecord) -> str:
    """One line a call, then the reasons by their numbers, then the costs of each way to cut."""
    if plan.refused is not None:
        return "\n".join(wrap(f"nothing moves: {plan.refused}"))
    reasons = NumberedReasons([*plan.moved, *plan.kept])
    rows = [("operator", "runs in", "worker ms", "trainer ms", "bytes", "why")]
    rows += [
        (
            shorten(call.operator, OPERATOR_CHARACTERS_MAX),
            call.place,
            milliseconds(call.worker_s),
            milliseconds(call.trainer_s),
            f"{call.made_bytes:,}" if call.made_bytes else "",
            f"[{reasons.number_of(call)}]",
        )
        for call in (*plan.moved, *plan.kept)
    ]
    lines = [*wrap(verdict(plan)), "", *align(rows, "<<>>><"), ""]
    for number, reason in enumerate(reasons.spoken(), start=1):
        lines += wrap(f"[{number}] {reason}", indent="    ")
    totals = total_rows(plan)
    lines += ["", *align(totals, "<>>>>"[: len(totals[0])]), ""]
    for note in notes(plan):
        lines += wrap(note)
    return "\n".join(lines)


class NumberedReasons:
    """The reasons of calls by number, from 1: a reason is a sentence and many calls share it."""

    def __init__(self, calls: Sequence[PlannedCall]) -> None:
        self._kinds: dict[object, dict[str, None]] = {}
        for call in calls:
            self._kinds.setdefault(kind_of(call.reason), {})[call.reason] = None
        self._numbers = {kind: number for number, kind in enumerate(self._kinds, start=1)}

    def number_of(self, call: PlannedCall) -> int:
        return self._numbers[kind_of(call.reason)]

    def spoken(self) -> list[str]:
        """One sentence for each number."""
        return [_spoken(list(reasons)) for reasons in self._kinds.values()]


def total_rows(plan: PlanRecord) -> list[tuple[str, ...]]:
    """The costs of each way to cut, below their titles; bytes are sent by a pool alone."""
    rows = [("per batch", "worker ms", "trainer ms", "bytes read", "bytes sent")]
    rows += [
        (
            CUT_NAMES[item.cut],
            f"{item.worker_s * 1e3:.3f}",
            f"{item.trainer_s * 1e3:.3f}",
            f"{item.boundary_bytes:,}",
            f"{item.sent_bytes:,}",
        )
        for item in plan.totals
    ]
    columns = 4 if plan.link_bytes_per_s is None else 5
    return [row[:columns] for row in rows]


def notes(plan: PlanRecord) -> list[str]:
    """What the figures of a plan mean."""
    found = [
        "Worker ms and trainer ms are those of calls that could move, each timed alone, one after "
        "the other; in a step they overlap with other work. Bytes read are the trainer's, out of "
        f"{plan.raw_bytes:,} of the raw batch that the model is given."
    ]
    if plan.link_bytes_per_s is not None:
        found.append(
            f"Bytes sent are those that cross the link from the pool's workers, at "
            f"{plan.link_bytes_per_s / 1e6:,.4g} MB/s when the plan was made."
        )
    devices = dict.fromkeys(call.device for call in (*plan.moved, *plan.kept) if call.device)
    if devices:
        found.append(
            f"Trainer ms of calls on {', '.join(devices)} are the device's, by its events; a call "
            "that is short there takes the host longer to start."
        )
    if plan.copy_bytes_per_s is not None:
        found.append(
            f"Copies from pinned memory to it ran at {plan.copy_bytes_per_s / 1e9:,.3g} GB/s."
        )
    if plan.priced is not None:
        found.append(format_price(plan.priced))
    if plan.workers_apart:
        found.append(
            "These workers have kernels that give other last bits than this process's, so they run "
            "only operators before them that are exact on every CPU, and the trainer runs the "
            f"others on their batches: {'; '.join(plan.workers_apart)}."
        )
    return found


def verdict(plan: PlanRecord) -> str:
    """One sentence: how much moves, and the time that it spares the trainer."""
    count = len(plan.moved) + len(plan.kept)
    moved = f"{len(plan.moved)} of {count} calls run in the workers"
    spent = {item.cut: item.trainer_s for item in plan.totals}
    if not plan.moved or "none" not in spent or "chosen" not in spent:
        return f"{moved}."
    spared_ms = (spent["none"] - spent["chosen"]) * 1e3
    step = "" if plan.priced is None else f" in steps of {plan.priced.step_s * 1e3:.3g} ms"
    return (
        f"{moved}, which spares the trainer about {spared_ms:.3g} ms of work a batch{step}; the "
        f"workers spend {sum(call.worker_s for call in plan.moved) * 1e3:.3g} ms on it."
    )


def _spoken(reasons: list[str]) -> str:
    """One reason, or the common part of several calls' reasons and the part that each has alone."""
    if len(reasons) == 1:
        return reasons[0]
    read = [match[1] for reason in reasons if (match := _READ.match(reason))]
    if len(read) == len(reasons):
        more = len(read) - NAMES_MAX
        names = ", ".join(read[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
        return f"each reads one of these, which training changes: {names}"
    plural = "others" if len(reasons) > 2 else "other"
    return f"{reasons[0]} ({len(reasons) - 1} {plural} likewise, with names of their own)"


def format_price(price: RunningPrice) -> str:
    """A sentence or two."""
    workers = "1 worker" if price.worker_count == 1 else f"{price.worker_count} workers"
    changes = {0: "never changed", 1: "changed once"}.get(
        price.changes, f"changed {price.changes} times"
    )
    final = " A change that made steps longer was taken back." if price.is_held else ""
    link = f", of the link {price.link_s * 1e3:.3g} ms" if price.link_s > 0 else ""
    return (
        f"Priced {price.times} times from the running loader, {changes}: a step takes "
        f"{price.step_s * 1e3:.3g} ms, of the trainer {price.trainer_s * 1e3:.3g} ms, of one of "
        f"{workers} {price.worker_s * 1e3:.3g} ms{link}.{final}"
    )


def kind_of(reason: str) -> object:
    """Equal for reasons that stand in one line of the table."""
    return next((kind for kind in KINDS if kind.match(reason)), reason)


def align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The rows in columns, with a rule under the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(sides))]
    lines = [
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return lines


def wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def shorten(text: str, characters_max: int) -> str:
    """The text with its middle left out: the name of the call is at its begin, the place at its
    end."""
    if len(text) <= characters_max:
        return text
    what, separator, where = text.rpartition(" at ")
    room = characters_max - len(separator) - len(where) - 1
    if room < 8:  # it is no call, or its file has a very long name
        return f"{text[: characters_max // 2]}…{text[-((characters_max - 1) // 2) :]}"
    return f"{what[:room]}…{separator}{where}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds else ""
