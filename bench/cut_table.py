# SPDX-License-Identifier: Apache-2.0
"""The figures of bench/cut.py as tables, and the result for each of the project's bounds."""

from __future__ import annotations

from collections.abc import Sequence

from cut_training import KINDS
from cut_workloads import WORKLOADS
from figures import Record
from table import MET, MISSED, OPEN, Figures, aligned, number, spread

RATIO_FLOOR = 0.97  # of the cut to the better of no cut and the maximal one
OVERHEAD_CEILING_PERCENT = 3.0
OVERHEAD_STEP_US = 5000.0  # the bound is on a step of this length


def render(records: Sequence[Record]) -> str:
    figures = Figures(records)
    rates = [case for case in figures.cases if figures.find(case, "steps_per_s", "auto")]
    overheads = [case for case in figures.cases if case not in rates]
    parts = []
    if rates:
        parts += [
            aligned(_rate_rows(figures, rates)),
            aligned(_ratio_rows(figures, rates)),
            aligned(_plan_rows(figures, rates)),
        ]
    if overheads:
        parts.append(aligned(_overhead_rows(figures, overheads)))
    return "\n\n".join(parts)


def _rate_rows(figures: Figures, cases: Sequence[str]) -> list[list[str]]:
    heads = ("no offload", "no cut", "maximal", "auto")
    rows = [["case, steps/s", *heads, "waiting for batches", "foreign cores", "rounds"]]
    for case in cases:
        rates = [_found(figures, case, "steps_per_s", kind) for kind in KINDS]
        waits = [_found(figures, case, "waiting_share", kind)["median"] for kind in KINDS]
        busy = [_found(figures, case, "foreign_cores", kind)["median"] for kind in KINDS]
        rows.append(
            [
                _short(case),
                *(spread(rate, 1.0) for rate in rates),
                ", ".join(f"{wait:.0%}" for wait in waits),
                f"{max(busy):.2f}",
                str(rates[0]["n"]),
            ]
        )
    return rows


def _ratio_rows(figures: Figures, cases: Sequence[str]) -> list[list[str]]:
    rows = [
        ["case", "auto / better", "95% interval", "by session", "auto / none", "auto / maximal"]
    ]
    rows[0] += ["auto / no offload", "maximal / none", "required", "verdict"]
    for case in cases:
        better = _found(figures, case, "ratio", "auto", "better")
        low, high = better["interval"]
        demand = f"interval >= {RATIO_FLOOR}"
        verdict = MET if low >= RATIO_FLOOR else OPEN if high >= RATIO_FLOOR else MISSED
        maximal = _found(figures, case, "ratio", "maximal", "none")
        if WORKLOADS[_short(case)].maximal_must_lose:
            demand += ", maximal below none"
            verdict += f", {MET if maximal['interval'][1] < 1 else MISSED}"
        others = [_found(figures, case, "ratio", "auto", o) for o in ("none", "maximal", "eager")]
        rows.append(
            [
                _short(case),
                f"{better['median']:.3f}",
                f"{low:.3f}..{high:.3f}",
                ", ".join(f"{value:.3f}" for value in better["parameters"]["of_sessions"]),
                *(_with_interval(record) for record in [*others, maximal]),
                demand,
                verdict,
            ]
        )
    return rows


def _plan_rows(figures: Figures, cases: Sequence[str]) -> list[list[str]]:
    rows = [["case, bytes per batch", "raw", "maximal", "auto", "calls moved: auto of maximal"]]
    rows[0] += ["priced to move, ms: maximal", "auto", "distinct plans of auto"]
    for case in cases:
        bytes_of = [
            _found(figures, case, metric, "auto")["median"]
            for metric in ("raw_bytes", "maximal_bytes", "boundary_bytes")
        ]
        moved = [_found(figures, case, "moved_calls", kind) for kind in ("auto", "maximal")]
        priced = [_found(figures, case, "priced_worker_s", kind) for kind in ("maximal", "auto")]
        rows.append(
            [
                _short(case),
                *(f"{value:,.0f}" for value in bytes_of),
                " of ".join(f"{record['median']:g}" for record in moved),
                *(spread(record, 1e3) for record in priced),
                str(len(moved[0]["parameters"]["plans"])),
            ]
        )
    return rows


def _overhead_rows(figures: Figures, cases: Sequence[str]) -> list[list[str]]:
    rows = [["case", "graphs", "step, ms", "overhead, us", "95% interval", "% of the step"]]
    rows[0] += [f"% of {OVERHEAD_STEP_US / 1e3:g} ms", "by process, us", "steps", "required"]
    rows[0] += ["verdict"]
    for case in cases:
        step = _found(figures, case, "step_s", "eager")
        overhead = _found(figures, case, "overhead_us", "offloaded", "eager")
        percent = _found(figures, case, "overhead_percent", "offloaded", "eager")
        low, high = (us / OVERHEAD_STEP_US * 100 for us in overhead["interval"])
        ceiling = OVERHEAD_CEILING_PERCENT
        parameters = overhead["parameters"]
        rows.append(
            [
                _short(case),
                str(parameters["graphs"]),
                spread(step, 1e3),
                f"{overhead['median']:.1f}",
                "{:.1f}..{:.1f}".format(*overhead["interval"]),
                f"{percent['median']:.2f}",
                f"{overhead['median'] / OVERHEAD_STEP_US * 100:.2f}",
                ", ".join(number(value) for value in parameters["of_processes"]),
                f"{overhead['n']:,}",
                f"interval <= {ceiling:g}% of {OVERHEAD_STEP_US / 1e3:g} ms",
                MET if high <= ceiling else OPEN if low <= ceiling else MISSED,
            ]
        )
    return rows


def _found(figures: Figures, case: str, metric: str, kind: str, over: str | None = None) -> Record:
    record = figures.find(case, metric, kind, over)
    assert record is not None, (case, metric, kind, over)
    return record


def _with_interval(record: Record) -> str:
    return "{:.3f} ({:.3f}..{:.3f})".format(record["median"], *record["interval"])


def _short(case: str) -> str:
    return case.rpartition("/")[2]
