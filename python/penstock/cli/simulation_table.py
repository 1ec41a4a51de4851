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

Runs = Mapping[str, Sequence[_pool.SimulationReport]]  # of each policy, by window and seed

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
    windows and seeds, and the seconds of the gain, by where they come from."""

    mean: float
    least: float
    most: float
    interval_low: float | None
    interval_high: float | None
    waiting_gain_s: float
    running_gain_s: float


def comparison(runs: Runs, policy: str, window_count: int = 1) -> Comparison:
    """Compares a policy with the first one, run by run.

    The interval is over the runs of one window, or over the means of several windows, since the
    runs of a window have their jobs in common.
    """
    others, own = runs[next(iter(runs))], runs[policy]
    speedup = _pool.paired_speedup(_means_s(others, len(others)), _means_s(own, len(own)))
    by_window = speedup
    if window_count > 1:
        by_window = _pool.paired_speedup(
            _means_s(others, window_count), _means_s(own, window_count)
        )
    gains = [_pool.gain_parts(other, mine) for other, mine in zip(others, own, strict=True)]
    return Comparison(
        speedup.mean,
        speedup.least,
        speedup.most,
        by_window.interval_low,
        by_window.interval_high,
        fmean(waiting for waiting, _ in gains),
        fmean(running for _, running in gains),
    )


def _means_s(reports: Sequence[_pool.SimulationReport], group_count: int) -> list[float]:
    """Mean completion times of so many groups of consecutive runs."""
    size = len(reports) // group_count
    return [
        fmean(run.completion_mean_s for run in reports[first : first + size])
        for first in range(0, len(reports), size)
    ]


def table(runs: Runs, window_count: int = 1) -> str:
    """Means over windows and seeds, then the comparisons."""
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
    sentences = [_sentence(runs, policy, first, window_count) for policy in others]
    return "\n".join([*lines, "", *sentences]).rstrip()


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


def _sentence(runs: Runs, policy: str, first: str, window_count: int) -> str:
    it = comparison(runs, policy, window_count)
    interval = ""
    if it.interval_low is not None:
        interval = f", 95 % interval {it.interval_low:.2f} to {it.interval_high:.2f}"
    return (
        f"{policy} is {it.mean:.2f} times as fast as {first} in mean completion time (runs "
        f"{it.least:.2f} to {it.most:.2f}{interval}): {it.waiting_gain_s / 3600:.2f} h of the gain "
        f"are waiting, {it.running_gain_s / 3600:.2f} h running"
    )
