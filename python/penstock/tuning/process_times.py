# SPDX-License-Identifier: Apache-2.0
"""How long processes were on a CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """Seconds that these processes were on a CPU or waited for one, together; None if the system
    does not say. A dead process counts until somebody has waited for it.
    """
    try:
        return float(sum(map(_cpu_seconds_of, pids)))
    except OSError:
        return None


def _cpu_seconds_of(pid: int) -> float:
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime
    for thread in (folder / "task").iterdir():
        try:
            seconds += int((thread / "schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):
            continue  # it ended, or the kernel was built without
    return seconds
