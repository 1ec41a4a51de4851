# SPDX-License-Identifier: Apache-2.0
"""The figures of simulated policies as a table of text, and each policy against the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from penstock import _pool

# Names of a report's figures.
FIGURES = (
    "completion_mean_s",
    "completion_median_s",
    "completion_p99_s",
    "waiting_mean_s",
    "running_mean_s",
    "makespan_s",
    "gpu_allocated_share",
    "gpu_busy_share",
    "cpu_used_share",
    "operations_per_job_minute",
    "moved_bytes",
)

Runs = Mapping[str, Sequence[_pool.SimulationReport]]  # of each policy, by seed

_HEADER = (
    "policy",
    "mean h",
    "median h",
    "p99 h",
    "waiting h",
    "running h",
    "makespan d",
    "GPUs held",
    "busy",
    "CPUs used",
    "ops/job-min",
    "TB moved",
)


class Comparison(NamedTuple):
    """A policy's mean completion time against the first policy's: how many times shorter, over
    seeds, and the seconds of the gain, by where they come from."""

    mean: float
    least: float
    most: float
    interval_low: float | None
    interval_high: float | None
    waiting_gain_s: float
    running_gain_s: float


def comparison(runs: Runs, policy: str, *, with_policy: str | None = None) -> Comparison:
    """Compares two policies seed by seed; ``with_policy`` is the first one unless it is named."""
    others, own = runs[with_policy or next(iter(runs))], runs[policy]
    speedup = _pool.paired_speedup(
        [run.completion_mean_s for run in others], [run.completion_mean_s for run in own]
    )
    gains = [_pool.gain_parts(other, mine) for other, mine in zip(others, own, strict=True)]
    return Comparison(
        speedup.mean,
        speedup.least,
        speedup.most,
        speedup.interval_low,
        speedup.interval_high,
        fmean(waiting for waiting, _ in gains),
        fmean(running for _, running in gains),
    )


def table(runs: Runs) -> str:
    """Means over the seeds, then the comparisons."""
    rows = [_HEADER, *(_row(policy, reports) for policy, reports in runs.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    first, *others = runs
    return "\n".join([*lines, "", *(_sentence(runs, policy, first) for policy in others)]).rstrip()


def _row(policy: str, reports: Sequence[_pool.SimulationReport]) -> tuple[str, ...]:
    mean = {name: fmean(getattr(report, name) for report in reports) for name in FIGURES}
    return (
        policy,
        *(f"{mean[name] / 3600:.2f}" for name in FIGURES[:5]),
        f"{mean['makespan_s'] / 86400:.1f}",
        f"{mean['gpu_allocated_share']:.2f}",
        f"{mean['gpu_busy_share']:.2f}",
        "-" if policy == "infinite" else f"{mean['cpu_used_share']:.2f}",
        f"{mean['operations_per_job_minute']:.3f}",
        f"{mean['moved_bytes'] / 1e12:.1f}",
    )


def _sentence(runs: Runs, policy: str, first: str) -> str:
    it = comparison(runs, policy)
    interval = ""
    if it.interval_low is not None:
        interval = f", 95 % interval {it.interval_low:.2f} to {it.interval_high:.2f}"
    return (
        f"{policy} is {it.mean:.2f} times as fast as {first} in mean completion time (seeds "
        f"{it.least:.2f} to {it.most:.2f}{interval}): {it.waiting_gain_s / 3600:.2f} h of the gain "
        f"are waiting, {it.running_gain_s / 3600:.2f} h running"
    )
