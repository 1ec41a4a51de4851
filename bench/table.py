# SPDX-License-Identifier: Apache-2.0
"""The figures as two tables for a terminal or a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from figures import Record
from workloads import load

FAULTS_PER_MB_CEILING = 1.0
# By question, where the target is not "no worse". Fresh workers: 0.4 of torch's time.
FLOORS = {"spawn_start": 2.5, "forkserver_start": 2.5}
MET, OPEN, MISSED = "met", "open", "MISSED"


@dataclass(frozen=True, slots=True)
class Floor:
    """A bound from the project's plan, and whether the figures meet it."""

    case: str
    demand: str
    seen: str
    verdict: str


class Figures:
    """Looks records up by case, metric and kind. Thread-compatible."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        self.cases = list(dict.fromkeys(r["name"].rpartition("/")[0] for r in self.records))

    def find(self, case: str, metric: str, kind: str, over: str | None = None) -> Record | None:
        for record in self.records:
            parameters = record["parameters"]
            wanted = (f"{case}/{metric}", kind, over)
            if (record["name"], parameters["kind"], parameters.get("over")) == wanted:
                return record
        return None

    def median(self, case: str, metric: str, kind: str, over: str | None = None) -> float | None:
        record = self.find(case, metric, kind, over)
        return None if record is None else float(record["median"])


def render(figures: Figures) -> str:
    """Speeds and ratios, costs, and the result for each floor."""
    parts = [aligned(_speed_rows(figures))]
    for rows in (_cost_rows(figures), _turn_rows(figures), _held_rows(figures)):
        if len(rows) > 1:
            parts.append(aligned(rows))
    verdicts = [["case", "required", "measured", "verdict"]]
    verdicts += [[short(f.case), f.demand, f.seen, f.verdict] for f in floors(figures)]
    if len(verdicts) > 1:
        parts.append(aligned(verdicts))
    return "\n\n".join(parts)


def short(case: str) -> str:
    return case.removeprefix("loader/")


def floors(figures: Figures) -> list[Floor]:
    result = []
    for case in figures.cases:
        ratio = figures.find(case, "ratio", "penstock", over="torch")
        if ratio is None:
            continue
        workload = load(case.rpartition("/")[2])
        is_rate = figures.find(case, "batches_per_s", "torch") is not None
        floor = workload.floor if is_rate else FLOORS.get(short(case).partition("/")[0], 0.97)
        low, high = ratio["interval"]
        demand, seen = f"ratio >= {floor:g}", f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]"
        if floor > 1:
            verdict = MET if ratio["median"] >= floor else MISSED
        else:
            # Missed is an interval below the floor; one that contains it needs more rounds.
            verdict = MET if low >= floor else OPEN if high >= floor else MISSED
        of_sampler = figures.median(case, "ratio", "penstock", over="sampler")
        if workload.floor_of_sampler and of_sampler is not None:
            demand += f" or {workload.floor_of_sampler:g} of the sampler alone"
            seen += f", {of_sampler:.2f} of the sampler"
            if of_sampler >= workload.floor_of_sampler:
                verdict = MET
        result.append(Floor(case, demand, seen, verdict))
        if is_rate:
            result += _cost_floors(figures, case, workload.ceiling_of_cpu)
    return result


def _cost_floors(figures: Figures, case: str, ceiling_of_cpu: float) -> list[Floor]:
    result = []

    def add(demand: str, seen: str, met: bool) -> None:
        result.append(Floor(case, demand, seen, MET if met else MISSED))

    cpu_ours, cpu_theirs = (
        figures.median(case, "cpu_s_per_gb", kind) for kind in ("penstock", "torch")
    )
    if ceiling_of_cpu < float("inf") and cpu_ours is not None and cpu_theirs:
        demand = f"CPU per GB <= {ceiling_of_cpu:g} of torch's"
        add(demand, f"{cpu_ours / cpu_theirs:.3f}", cpu_ours / cpu_theirs <= ceiling_of_cpu)
    faults = figures.median(case, "faults_per_mb", "penstock")
    if faults is not None:
        add(f"faults per MB < {FAULTS_PER_MB_CEILING:g}", f"{faults:.2f}", faults < 1.0)
    ours, theirs = (
        figures.median(case, "peak_memory_bytes", kind) for kind in ("penstock", "torch")
    )
    if ours is not None and theirs is not None:
        seen = f"{(ours - theirs) / 2**20:+.0f} MiB"
        add("peak memory <= torch's", seen, ours <= theirs)
    return result


# The answer to a question: the metric, its unit in the table, and how many of the unit one is.
ANSWERS = (
    ("batches_per_s", "batches/s", 1.0),
    ("latency_s", "ms", 1e3),
    ("growth_bytes", "MiB", 2**-20),
)


def _speed_rows(figures: Figures) -> list[list[str]]:
    head = ["case", "unit", "torch", "penstock", "ratio", "95% interval", "of limit", "rounds"]
    rows = [head]
    for case in figures.cases:
        answers = {r["name"].rpartition("/")[2] for r in figures.records if _is_of(r, case)}
        metric, unit, scale = next(answer for answer in ANSWERS if answer[0] in answers)
        row = [short(case), unit]
        for kind in ("torch", "penstock"):
            record = figures.find(case, metric, kind)
            row.append("-" if record is None else spread(record, scale))
        ratio = figures.find(case, "ratio", "penstock", over="torch")
        row += ["-", "-"] if ratio is None else [_x(ratio["median"]), _interval(ratio)]
        shares = [figures.median(case, "ratio", k, over="limit") for k in ("torch", "penstock")]
        row.append(" -> ".join("-" if s is None else f"{s:.3g}" for s in shares))
        rounds = figures.find(case, metric, "torch")
        row.append(str(rounds["n"]) if rounds else "-")
        rows.append(row)
    return rows


def _is_of(record: Record, case: str) -> bool:
    return bool(record["name"].rpartition("/")[0] == case)


def _cost_rows(figures: Figures) -> list[list[str]]:
    return _metric_rows(figures, "cpu_s_per_gb", COSTS)


def _turn_rows(figures: Figures) -> list[list[str]]:
    return _metric_rows(figures, "beyond_batch_s", TURNS)


def _held_rows(figures: Figures) -> list[list[str]]:
    return _metric_rows(figures, "pss_bytes", HELD)


COSTS = (
    ("GB/s", "gb_per_s", 1.0),
    ("CPU s/GB", "cpu_s_per_gb", 1.0),
    ("faults/batch", "faults_per_batch", 1.0),
    ("faults/MB", "faults_per_mb", 1.0),
    ("peak PSS, MiB", "peak_pss_bytes", 2**-20),
    ("peak memory, MiB", "peak_memory_bytes", 2**-20),
    ("foreign cores", "foreign_cores", 1.0),
)
TURNS = (
    ("one batch, ms", "batch_s", 1e3),
    ("turn-around beyond it, ms", "beyond_batch_s", 1e3),
)
HELD = (
    ("every worker, s", "every_worker_s", 1.0),
    ("PSS, MiB", "pss_bytes", 2**-20),
    ("open fds", "open_fds", 1.0),
    ("fds since epoch 1", "open_fds_growth", 1.0),
)


def _metric_rows(
    figures: Figures, present: str, metrics: Sequence[tuple[str, str, float]]
) -> list[list[str]]:
    """The cases that have the metric ``present``."""
    rows = [["case (torch -> penstock)", *(heading for heading, _, _ in metrics)]]
    for case in figures.cases:
        if figures.find(case, present, "torch") is None:
            continue
        row = [short(case)]
        for _, metric, scale in metrics:
            both = [figures.median(case, metric, kind) for kind in ("torch", "penstock")]
            row.append(" -> ".join("-" if v is None else number(v * scale) for v in both))
        rows.append(row)
    return rows


def spread(record: Record, scale: float) -> str:
    median, p10, p90 = (number(record[name] * scale) for name in ("median", "p10", "p90"))
    return f"{median} ({p10}..{p90})"


def _interval(record: Record) -> str:
    low, high = record["interval"]
    return f"{low:.2f}..{high:.2f}"


def _x(ratio: float) -> str:
    return f"{ratio:.2f}x"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# A metric, its heading, how many of the heading's unit one is, and the format of a figure.
Column = tuple[str, str, float, str]


def by_parameter(records: Iterable[Record], name: str) -> dict[Any, dict[str, Record]]:
    """By the values of a parameter, the records by their metrics."""
    found: dict[Any, dict[str, Record]] = {}
    for record in records:
        metric = record["name"].partition("/")[2]
        found.setdefault(record["parameters"][name], {})[metric] = record
    return found


def metric_cells(found: dict[str, Record], columns: Sequence[Column]) -> list[str]:
    """The medians, and the spread where there are several values."""
    cells = []
    for metric, _, scale, form in columns:
        record = found[metric]
        median, p10, p90 = (form.format(record[key] * scale) for key in ("median", "p10", "p90"))
        cells.append(f"{median} ({p10}..{p90})" if record["n"] > 1 else median)
    return cells


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"| {' | '.join(cells)} |")
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
