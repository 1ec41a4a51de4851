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

# Reasons that differ only in a name; a deep model has one for each parameter.
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
NAMES_MAX = 6  # parameters per line of the table
CUT_NAMES = {
    "none": "no cut",
    "maximal": "everything that can move",
    "chosen": "this plan",
    "exact": "without cut_tolerance",
}


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the model's forward, or several calls that write to the same memory.

    Attributes:
        index (int): Number of the call, by which edges refer to it, in the order of the program.
        operator (str): Operator and position as in the program: "interpolate at model.py:14".
        place (str): ``"worker"``, ``"trainer"``, or ``"both"`` for values that each side computes.
        reason (str): Reason for the place, as a sentence.
        worker_s (float): Seconds per batch if a worker runs it.
        trainer_s (float): Seconds per batch if the trainer runs it, on ``device``, measured by
            that device's events; 0 for calls that cannot move.
        made_bytes (int): Bytes of memory per batch that it allocates and other calls read; 0 for a
            view.
        largest_difference (float | None): Largest difference so far between results that depend on
            the call and the device's results, in the unit of ``cut_tolerance``; None if the call
            does not move because of that option.
        device (str | None): Device on which the program has the results; None for the CPU.
    """

    index: int
    operator: str
    place: str
    reason: str
    worker_s: float
    trainer_s: float
    made_bytes: int
    largest_difference: float | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedEdge:
    """Tensors that one call passes to another. Parameters and constants are left out.

    Attributes:
        source (int | None): ``index`` of the call that makes them; None for tensors of the batch.
        target (int | None): ``index`` of the call that reads them; None for results of forward.
        tensor_bytes (int): Bytes per batch; memory that tensors share is counted once.
        leaf (int | None): Number of the tensor in the batch, from 0, if ``source`` is None.
    """

    source: int | None
    target: int | None
    tensor_bytes: int
    leaf: int | None


@dataclass(frozen=True, slots=True)
class CutTotals:
    """Costs per batch of one way to cut, all from the same measurement.

    Attributes:
        cut (str): ``"none"``, ``"maximal"``, ``"chosen"`` (the plan), or ``"exact"`` (the plan
            without ``cut_tolerance``).
        worker_s (float): Seconds of a worker.
        trainer_s (float): Seconds of the trainer for the calls that could move and do not.
        boundary_bytes (int): Bytes that the trainer reads, of the workers' results and of the raw
            batch.
        sent_bytes (int): Bytes that a pool's workers send: the same, or with the whole raw batch
            if all of it is sent. Tensors that are not passed to the model are not counted.
    """

    cut: Literal["none", "maximal", "chosen", "exact"]
    worker_s: float
    trainer_s: float
    boundary_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RunningPrice:
    """Duration of a step with a plan, by measurements of the running loader. Seconds per batch.

    Attributes:
        times (int): Number of times that the plan was priced in this way.
        changes (int): Number of times that the plan was changed as a result.
        trainer_s (float): Seconds of work in the trainer, for the whole step.
        worker_s (float): Seconds of work in a worker, including the dataset.
        worker_count (int): Number of workers that share the batches.
        link_s (float): Seconds of transfer from a pool's workers, or to a device.
        step_s (float): Seconds of the slowest side: the trainer, the workers together, the link to
            a pool's workers or to the trainer's device, or the CPUs that they share.
        is_held (bool): Whether a change made steps longer and was reverted; the plan then stays as
            it is until the loads change.
    """

    times: int
    changes: int
    trainer_s: float
    worker_s: float
    worker_count: int
    link_s: float
    step_s: float
    is_held: bool


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A cut with its prices; bytes and seconds are per batch.

    `refused` is None, or one sentence with the reason why the whole model stays in the trainer.
    """

    moved: tuple[PlannedCall, ...] = ()
    kept: tuple[PlannedCall, ...] = ()
    raw_bytes: int = 0  # the batch as the dataset makes it
    maximal_bytes: int = 0  # boundary size if everything that can move does
    boundary_bytes: int = 0  # bytes of the boundary that the trainer reads with this plan
    worker_s: float = 0.0  # seconds per batch and worker
    trainer_s: float = 0.0  # the trainer's seconds per batch on calls that could move and stay
    refused: str | None = None
    # For no cut, the maximal cut and this one, in this order; if `cut_tolerance` moves calls, also
    # for this cut without it.
    totals: tuple[CutTotals, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    # The link to a pool's workers when the plan was made; None on one machine.
    link_bytes_per_s: float | None = None
    # From pinned memory to the device on which the program has its batches; None without one.
    copy_bytes_per_s: float | None = None
    priced: RunningPrice | None = None  # None: priced by the calibration on one batch alone
    # Workers of a pool that run only the part that is exact on every CPU, with the reasons.
    workers_apart: tuple[str, ...] = ()


def format_plan(plan: PlanRecord) -> str:
    """Return one line per call, then the numbered reasons, then the costs of each cut."""
    if plan.refused is not None:
        return "\n".join(wrap(f"no call moves: {plan.refused}"))
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
    for number, reason in enumerate(reasons.sentences(), start=1):
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

    def sentences(self) -> list[str]:
        """Return one sentence for each number."""
        return [_format(list(reasons)) for reasons in self._kinds.values()]


def total_rows(plan: PlanRecord) -> list[tuple[str, ...]]:
    """Return the costs of each cut, below their titles; only a pool has sent bytes."""
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
    """Return the notes that explain the figures of a plan."""
    found = [
        "Worker ms and trainer ms are for calls that could move, each timed alone, one after the "
        "other; in a step they overlap with other work. Bytes read are read by the trainer; the "
        f"raw batch has {plan.raw_bytes:,} bytes."
    ]
    if plan.link_bytes_per_s is not None:
        found.append(
            f"Bytes sent cross the link from the pool's workers, measured at "
            f"{plan.link_bytes_per_s / 1e6:,.4g} MB/s when the plan was made."
        )
    devices = dict.fromkeys(call.device for call in (*plan.moved, *plan.kept) if call.device)
    if devices:
        found.append(
            f"Trainer ms of calls on {', '.join(devices)} are device times, measured by events; "
            "the host may take longer to launch a short call."
        )
    if plan.copy_bytes_per_s is not None:
        found.append(
            "Copies from pinned memory to the device ran at "
            f"{plan.copy_bytes_per_s / 1e9:,.3g} GB/s."
        )
    if plan.priced is not None:
        found.append(format_price(plan.priced))
    if plan.workers_apart:
        found.append(
            "The kernels of these workers differ from this process's in the last bits, so these "
            "workers run only the leading operators that are exact on every CPU, and the trainer "
            f"runs the other operators on their batches: {'; '.join(plan.workers_apart)}."
        )
    return found


def verdict(plan: PlanRecord) -> str:
    """Return one sentence: how much moves, and the time that this saves the trainer."""
    count = len(plan.moved) + len(plan.kept)
    moved = f"{len(plan.moved)} of {count} calls run in the workers"
    spent = {item.cut: item.trainer_s for item in plan.totals}
    if not plan.moved or "none" not in spent or "chosen" not in spent:
        return f"{moved}."
    spared_ms = (spent["none"] - spent["chosen"]) * 1e3
    step = "" if plan.priced is None else f" in steps of {plan.priced.step_s * 1e3:.3g} ms"
    return (
        f"{moved}, which saves the trainer about {spared_ms:.3g} ms of work per batch{step}; the "
        f"workers spend {sum(call.worker_s for call in plan.moved) * 1e3:.3g} ms on it."
    )


def _format(reasons: list[str]) -> str:
    """Return one reason, or the common part of several reasons and each call's specific part."""
    if len(reasons) == 1:
        return reasons[0]
    read = [match[1] for reason in reasons if (match := _READ.match(reason))]
    if len(read) == len(reasons):
        more = len(read) - NAMES_MAX
        names = ", ".join(read[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
        return f"each reads one of these, which training changes: {names}"
    plural = "others" if len(reasons) > 2 else "other"
    return f"{reasons[0]} ({len(reasons) - 1} {plural} likewise, with different names)"


def format_price(price: RunningPrice) -> str:
    """Return a sentence or two about a price."""
    workers = "1 worker" if price.worker_count == 1 else f"{price.worker_count} workers"
    changes = {0: "never changed", 1: "changed once"}.get(
        price.changes, f"changed {price.changes} times"
    )
    final = " A change that made steps longer was reverted." if price.is_held else ""
    link = f", the link {price.link_s * 1e3:.3g} ms" if price.link_s > 0 else ""
    return (
        f"Priced {price.times} times from the running loader, {changes}: a step takes "
        f"{price.step_s * 1e3:.3g} ms, the trainer {price.trainer_s * 1e3:.3g} ms, one of "
        f"{workers} {price.worker_s * 1e3:.3g} ms{link}.{final}"
    )


def kind_of(reason: str) -> object:
    """Return a key that is equal for reasons that share a line of the table."""
    return next((kind for kind in KINDS if kind.match(reason)), reason)


def align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the rows in columns, with a rule under the first."""
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
    """Return the text without its middle: the call's name is at its start, its line at its end."""
    if len(text) <= characters_max:
        return text
    what, separator, where = text.rpartition(" at ")
    room = characters_max - len(separator) - len(where) - 1
    if room < 8:  # not a call, or its file has a very long name
        return f"{text[: characters_max // 2]}…{text[-((characters_max - 1) // 2) :]}"
    return f"{what[:room]}…{separator}{where}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds else ""
