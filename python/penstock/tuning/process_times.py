# SPDX-License-Identifier: Apache-2.0
"""How long processes were on a CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """Seconds on a CPU, and seconds of waiting for one."""

    on_cpu_s: float = 0.0
    delay_s: float = 0.0

    def __add__(self, other: ProcessTimes) -> ProcessTimes:
        return ProcessTimes(self.on_cpu_s + other.on_cpu_s, self.delay_s + other.delay_s)


def process_times(pids: Sequence[int]) -> ProcessTimes | None:
    """Of these processes together; None if the system does not say. A dead process counts until
    somebody has waited for it.
    """
    try:
        return sum(map(_times_of, pids), start=ProcessTimes())
    except OSError:
        return None


def thread_delay_s() -> float:
    """How long the calling thread has waited for a CPU so far; 0 where the system does not say."""
    try:
        fields = Path("/proc/thread-self/schedstat").read_text().split()
        return int(fields[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """Seconds that these processes were on a CPU or waited for one, together; None if the system
    does not say.
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
