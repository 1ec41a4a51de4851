# SPDX-License-Identifier: Apache-2.0
"""The outcome of a scenario, and the table of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streams import Differences, percentile

STALL_MAX_S = 2.0  # of the 99th percentile, where a worker of several is lost


@dataclass(slots=True)
class Outcome:
    scenario: str
    seed: int
    fault_count: int = 0
    batch_count: int = 0
    differences: Differences = field(default_factory=Differences)
    stalls: list[float] = field(default_factory=list)
    is_stall_bounded: bool = False
    errors: list[str] = field(default_factory=list)  # clear ones, with which a stream may end
    failures: list[str] = field(default_factory=list)  # all unexpected events
    skipped: str = ""  # why the fault was skipped
    seconds: float = 0.0

    @property
    def stalls_too_long(self) -> bool:
        return self.is_stall_bounded and percentile(self.stalls, 99) > STALL_MAX_S


COLUMNS = (
    "scenario",
    "faults",
    "batches",
    "missing",
    "doubled",
    "reordered",
    "different",
    "longest stall",
    "p99 stall",
    "ended by a clear error",
    "seed",
)


def row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.skipped:
        return (f"{outcome.scenario} (skipped: {outcome.skipped})", *["-"] * (len(COLUMNS) - 1))
    differences = outcome.differences
    has_stalls = bool(outcome.stalls)
    return (
        outcome.scenario,
        str(outcome.fault_count),
        str(outcome.batch_count),
        str(differences.missing),
        str(differences.doubled),
        str(differences.reordered),
        str(differences.different),
        f"{max(outcome.stalls):.2f} s" if has_stalls else "-",
        f"{percentile(outcome.stalls, 99):.2f} s" if has_stalls else "-",
        str(len(outcome.errors)),
        str(outcome.seed),
    )


def table(outcomes: Iterable[Outcome]) -> str:
    """In Markdown, with aligned columns for readers of the source."""
    rows = [COLUMNS, *map(row, outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def findings(outcomes: Sequence[Outcome]) -> list[str]:
    """All violations, with the command that repeats each."""
    found = []
    for outcome in outcomes:
        said = list(outcome.failures)
        if outcome.differences:
            said.append(f"batches are not those of one process: {outcome.differences}")
        if outcome.stalls_too_long:
            said.append(
                f"the 99th percentile of the stalls is {percentile(outcome.stalls, 99):.2f} s, and "
                f"at most {STALL_MAX_S:g} s beyond one batch is expected"
            )
        replay = f'again: make chaos ARGS="--only {outcome.scenario} --seed {outcome.seed}"'
        found += [f"{outcome.scenario}: {one}\n  {replay}" for one in said]
    return found
