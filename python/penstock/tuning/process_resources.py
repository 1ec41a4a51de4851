# SPDX-License-Identifier: Apache-2.0
"""The CPUs and the memory that this process may use, and the CPU time of processes.

CPUs are limited by affinity, by the quotas of cgroups, and by the number of ranks on the machine;
memory by the machine's and by the limits of cgroups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # from here on the first version of cgroups means "none"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def usable_cpus(root: Path = _ROOT) -> int:
    """Return the usable CPUs, at least 1. The ranks that torchrun starts on one machine share its
    CPUs evenly."""
    count = float(len(os.sched_getaffinity(0)))
    count = min([count, *_quotas(root)])
    return max(1, int(count / _local_rank_count()))


def shared_cpus(pids: Iterable[int], root: Path = _ROOT) -> int:
    """Return the CPUs that this process and the processes of ``pids`` may use together: their
    affinities differ when they were pinned. A process that has ended uses none.
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
    """Yield quotas in CPUs, from every cgroup that this process is in, up to the root of the
    mounted hierarchy."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _with_ancestors(root / "sys/fs/cgroup", group):
                quota, _, period = _read(folder / "cpu.max").partition(" ")
                yield from _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _with_ancestors(root / "sys/fs/cgroup" / controllers, group):
                yield from _ratio(
                    _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                )


def _with_ancestors(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of ``group`` and of the groups above it. In a container it may have its
    name on the host, and only the mount exist."""
    folder = mount / group.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Yield the ratio, or no value if there is no limit ("max", or -1)."""
    if quota.strip().isdecimal() and period.strip().isdecimal() and int(period) > 0:
        yield int(quota) / int(period)


def memory_left_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of free memory; None if the system does not report it."""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    left = [1024 * int(free[1])] if free else []
    return min([*left, *(left for _, left in _group_limits(root))], default=None)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the smallest memory limit of this process's cgroups; None if there is none."""
    return min((limit for limit, _ in _group_limits(root)), default=None)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup that has one, and the bytes left under it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            mount = mount / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            if place == mount.parent:
                break
            most, used = _read(place / limit).strip(), _read(place / usage).strip()
            if most.isdecimal() and used.isdecimal() and int(most) < _NO_LIMIT:
                yield int(most), max(0, int(most) - int(used) + _cache_bytes(place))


def _cache_bytes(group: Path) -> int:
    """Return the bytes of cached files, which the system frees when memory is requested."""
    text = _read(group / "memory.stat")
    found = re.search(r"^(?:total_inactive_file|inactive_file) (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """Seconds on a CPU, and seconds of waiting for one."""

    on_cpu_s: float = 0.0
    delay_s: float = 0.0

    def __add__(self, other: ProcessTimes) -> ProcessTimes:
        return ProcessTimes(self.on_cpu_s + other.on_cpu_s, self.delay_s + other.delay_s)


def process_times(pids: Sequence[int]) -> ProcessTimes | None:
    """Return the sum for these processes; None if the system does not report it. A dead process
    counts until it is reaped.
    """
    try:
        return sum(map(_times_of, pids), start=ProcessTimes())
    except OSError:
        return None


def thread_delay_s() -> float:
    """Return the calling thread's CPU wait so far; 0 if the system does not report it."""
    try:
        fields = Path("/proc/thread-self/schedstat").read_text().split()
        return int(fields[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """Return the total seconds that these processes were on a CPU or waited for one; None if the
    system does not report it.
    """
    times = process_times(pids)
    return None if times is None else times.on_cpu_s + times.delay_s


def _times_of(pid: int) -> ProcessTimes:
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    on_cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime
    delay_s = 0.0
    for thread in (folder / "task").iterdir():
        try:
            delay_s += int((thread / "schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):
            continue  # it ended, or the kernel was built without
    return ProcessTimes(on_cpu_s, delay_s)
