# SPDX-License-Identifier: Apache-2.0
"""The text of a plan for a terminal of 100 columns: a summary of about ten lines, and a table."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.graph.plan_record import PlannedCall, PlanRecord, RunningPrice

COLUMNS = 100
MOVED_MAX = 6  # lines of the summary for calls that move
_CAUSES_MAX = 3  # reasons in a line of the summary
# The width that the other columns leave, with bytes below a gigabyte.
_OPERATOR_MAX = 48

# Reasons that differ only in a name, and their form in the summary: a deep model has one for each
# parameter.
_KINDS = {
    re.compile(r"it reads \S+, which training changes"): "need{s} parameters",
    re.compile(r".* writes its operand in place"): "write{s} in place",
    re.compile(r"%\w+ is memory that changes: "): "use{s} memory that changes",
    re.compile(r"it depends on a value that stays: "): "need{s} values that stay",
}
_READ = re.compile(r"it reads (\S+), which training changes")
# Calls that the plan could move begin their reasons with it.
_COULD_MOVE = re.compile(r"it could move, (?:but is |but |and )?([^:;]*)")
_NAMES_MAX = 6  # parameters per line of the table
CUT_NAMES = {
    "none": "no cut",
    "maximal": "everything that can move",
    "chosen": "this plan",
    "exact": "without cut_tolerance",
}

# The plan's decision for a call. "cheaper" calls could move, but stay because of their price.
Role = Literal["moved", "cheaper", "stays", "both"]
_STAYING: dict[Role, tuple[str, str]] = {
    "cheaper": ("1 call could move but stays", "{} calls could move but stay"),
    "stays": ("1 call stays", "{} calls stay"),
    "both": ("1 call runs on both sides", "{} calls run on both sides"),
}


def role_of(call: PlannedCall) -> Role:
    if call.place == "worker":
        return "moved"
    if call.place == "both":
        return "both"
    return "cheaper" if _COULD_MOVE.match(call.reason) else "stays"


def format_summary(plan: PlanRecord) -> str:
    """Return the verdict, the calls that move, a line for the calls that stay, and the costs."""
    if plan.refused is not None:
        return "\n".join([*wrap(verdict(plan)), *_sample_lines(plan)])
    lines = [*wrap(verdict(plan)), "", *_moved_lines(plan.moved)]
    for role in _STAYING:
        calls = [call for call in plan.kept if role_of(call) == role]
        lines += [_staying_line(role, calls)] if calls else []
    if plan.totals:
        lines += ["", *align(_total_rows(plan), "<>>>>")]
    if plan.workers_apart:
        lines += ["", *wrap(_apart(plan))]
    lines.append("plan.table(), or penstock explain --verbose, lists every call.")
    return "\n".join([*lines, *_sample_lines(plan)])


def _sample_lines(plan: PlanRecord) -> list[str]:
    return ["", *plan.sample.splitlines()] if plan.sample else []


def _moved_lines(moved: Sequence[PlannedCall]) -> list[str]:
    if not moved:
        return []
    shown = moved if len(moved) <= MOVED_MAX else moved[: MOVED_MAX - 1]
    rows = [("moves", "worker ms", "trainer ms", "bytes"), *(_figures(call) for call in shown)]
    lines = align(rows, "<>>>")
    if more := moved[len(shown) :]:
        lines.append(_clipped(f"... {len(more)} more calls move, {span(more)}"))
    return lines


def _staying_line(role: Role, calls: Sequence[PlannedCall]) -> str:
    one, many = _STAYING[role]
    line = f"... {one if len(calls) == 1 else many.format(len(calls))}, {span(calls)}"
    if role == "both":
        return _clipped(line)
    causes = Counter(_cause(call.reason) for call in calls).most_common()
    shown = [
        (cause.replace("{s}", "s" if count == 1 else ""), count)
        for cause, count in causes[:_CAUSES_MAX]
    ]
    if len(causes) == 1:
        return _clipped(f"{line}: {shown[0][0]}")
    parts = [f"{count} {cause}" for cause, count in shown]
    if len(causes) > len(shown):
        parts.append("...")
    return _clipped(f"{line}: {', '.join(parts)}")


def _cause(reason: str) -> str:
    if could_move := _COULD_MOVE.match(reason):
        return could_move[1]
    return next((cause for kind, cause in _KINDS.items() if kind.match(reason)), reason)


def _clipped(line: str) -> str:
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def span(calls: Sequence[PlannedCall]) -> str:
    """Return the first and the last of some calls: "conv2d … add at model.py:12-195"."""
    names = [call.operator.rpartition(" at ")[0] or call.operator for call in calls]
    if len(names) > 3:
        names = [f"{names[0]} … {names[-1]}"]
    return " at ".join(filter(None, (shorten(", ".join(names), 30), _shared_places(calls))))


def _shared_places(calls: Iterable[PlannedCall]) -> str:
    """Return the source lines of calls: "model.py:14", "model.py:14-20", "model.py, layers.py"."""
    lines: dict[str, list[int]] = {}
    for call in calls:
        file, _, line = call.operator.rpartition(" at ")[2].rpartition(":")
        if file and line.isdecimal():
            lines.setdefault(file, []).append(int(line))
    spans = [
        f"{file}:{min(numbers)}" + (f"-{max(numbers)}" if len({*numbers}) > 1 else "")
        for file, numbers in lines.items()
    ]
    return spans[0] if len(spans) == 1 else ", ".join(lines)


def format_table(plan: PlanRecord) -> str:
    """Return one line per call, then the numbered reasons, then the costs of each cut."""
    if plan.refused is not None:
        return "\n".join([*wrap(verdict(plan)), *_sample_lines(plan)])
    calls = (*plan.moved, *plan.kept)
    reasons = NumberedReasons(calls)
    rows = [("operator", "runs in", "worker ms", "trainer ms", "bytes", "why")]
    for call in calls:
        operator, worker_ms, trainer_ms, size = _figures(call)
        why = f"[{reasons.number_of(call)}]"
        rows.append((operator, call.place, worker_ms, trainer_ms, size, why))
    lines = [*wrap(verdict(plan)), "", *align(rows, "<<>>><", rule=True), ""]
    for number, reason in enumerate(reasons.sentences(), start=1):
        lines += wrap(f"[{number}] {reason}", indent="    ")
    lines += ["", *align(_total_rows(plan), "<>>>>", rule=True), ""]
    lines += wrap(
        "Worker ms and trainer ms are for calls that could move, each timed alone, one after the "
        "other; in a step they overlap with other work. Bytes read are read by the trainer; the "
        f"raw batch has {plan.raw_bytes:,} bytes."
    )
    for note in notes(plan):
        lines += wrap(note)
    return "\n".join([*lines, *_sample_lines(plan)])


def _figures(call: PlannedCall) -> tuple[str, str, str, str]:
    return (
        shorten(call.operator, _OPERATOR_MAX),
        f"{call.worker_s * 1e3:.3f}" if call.worker_s else "",
        f"{call.trainer_s * 1e3:.3f}" if call.trainer_s else "",
        f"{call.made_bytes:,}" if call.made_bytes else "",
    )


class NumberedReasons:
    """The reasons of calls by number, from 1: a reason is a sentence and many calls share it."""

    def __init__(self, calls: Sequence[PlannedCall]) -> None:
        self._kinds: dict[object, dict[str, None]] = {}
        for call in calls:
            self._kinds.setdefault(_kind_of(call.reason), {})[call.reason] = None
        self._numbers = {kind: number for number, kind in enumerate(self._kinds, start=1)}

    def number_of(self, call: PlannedCall) -> int:
        return self._numbers[_kind_of(call.reason)]

    def sentences(self) -> list[str]:
        """Return one sentence for each number."""
        return [_format(list(reasons)) for reasons in self._kinds.values()]


def _total_rows(plan: PlanRecord) -> list[tuple[str, ...]]:
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
    """Return the conditions of a plan's figures: the link, the device, measured steps."""
    found = []
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
        found.append(_apart(plan))
    return found


def _apart(plan: PlanRecord) -> str:
    return (
        "The kernels of these workers differ from this process's in the last bits, so these "
        "workers run only the leading operators that are exact on every CPU, and the trainer "
        f"runs the other operators on their batches: {'; '.join(plan.workers_apart)}."
    )


def verdict(plan: PlanRecord) -> str:
    """Return one sentence: how much moves, and the time that this saves the trainer; or why no
    call moves."""
    if plan.refused is not None:
        return f"no call moves: {plan.refused}"
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
        more = len(read) - _NAMES_MAX
        names = ", ".join(read[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
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


def _kind_of(reason: str) -> object:
    """Return a key that is equal for reasons that share a line of the table."""
    return next((kind for kind in _KINDS if kind.match(reason)), reason)


def align(rows: Sequence[Sequence[str]], sides: str, *, rule: bool = False) -> list[str]:
    """Return the rows in columns, on request with a rule under the first."""
    sides = sides[: len(rows[0])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(sides))]
    lines = [
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    if rule:
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
