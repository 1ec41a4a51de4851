# SPDX-License-Identifier: Apache-2.0
"""A plan as text for a terminal of 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from penstock.graph.plan_record import PlannedCall, PlanRecord, RunningPrice

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
