# SPDX-License-Identifier: Apache-2.0
"""How many CPUs this process may use: by affinity, by the quotas of its cgroups, by its rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """At least 1. The ranks that torchrun starts on one machine share its CPUs evenly."""
    count = float(len(os.sched_getaffinity(0)))
    count = min([count, *_quotas(root)])
    return max(1, int(count / _local_rank_count()))


def shared_cpus(pids: Iterable[int], root: Path = _ROOT) -> int:
    """How many CPUs this process and those of ``pids`` may use together: where each may run differs
    when they were pinned. A process that is gone uses none.
    """
    cpus = set(os.sched_getaffinity(0))
    for pid in pids:
        try:
            cpus |= os.sched_getaffinity(pid)
        except OSError:
            continue
    return max(1, int(min([float(len(cpus)), *_quotas(root)]) / _local_rank_count()))


def _local_rank_count() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def _quotas(root: Path) -> Iterator[float]:
    """In CPUs, from every cgroup that this process is in, up to the root of the mounted
    hierarchy."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _and_above(root / "sys/fs/cgroup", group):
                quota, _, period = _read(folder / "cpu.max").partition(" ")
                yield from _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _and_above(root / "sys/fs/cgroup" / controllers, group):
                yield from _ratio(
                    _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                )


def _and_above(mount: Path, group: str) -> Iterator[Path]:
    """In a container ``group`` may be named as the host has it, and only the mount be there."""
    folder = mount / group.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Nothing where there is no limit ("max", or -1)."""
    if quota.strip().isdecimal() and period.strip().isdecimal() and int(period) > 0:
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
