# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take: the machine's, and that of its cgroups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # from here on the first version of cgroups means "none"


def memory_left_bytes(root: Path = _ROOT) -> int | None:
    """None where the system does not say."""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    left = [1024 * int(free[1])] if free else []
    return min([*left, *_of_groups(root)], default=None)


def _of_groups(root: Path) -> Iterator[int]:
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
                yield max(0, int(most) - int(used) + _cache_bytes(place))


def _cache_bytes(group: Path) -> int:
    """Of files, which the system gives up when memory is asked for."""
    text = _read(group / "memory.stat")
    found = re.search(r"^(?:total_inactive_file|inactive_file) (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
