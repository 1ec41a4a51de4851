# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine, read from the system: its kernel and C library, its CPUs and memory,
and the limits that a container or a shell puts on this process."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock._native import c_library
from penstock.pool.descriptor_limit import LEAST
from penstock.tuning.usable_cpus import usable_cpus

_ROOT = Path("/")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
    "locked memory": resource.RLIMIT_MEMLOCK,
}
_BYTE_LIMITS = ("address space", "locked memory")


def machine_facts(root: Path = _ROOT) -> dict[str, Callable[[], str | Iterable[str]]]:
    """By name, what finds the fact; each may raise. ``root`` has proc, sys and etc."""
    return {
        "system": lambda: f"{_distribution(root)}; {platform.system()} {platform.release()}",
        "C_library": lambda: c_library() or "not glibc",
        "machine": platform.machine,
        "CPU": lambda: _field(root / "proc/cpuinfo", "model name|Processor|cpu model"),
        "CPUs": lambda: (
            f"{os.cpu_count()} there, {len(os.sched_getaffinity(0))} that this process may run on, "
            f"{usable_cpus(root)} by the quotas of its cgroups"
        ),
        "memory": lambda: (
            f"{_kibibytes(root, 'MemTotal')}, of which {_kibibytes(root, 'MemAvailable')} are free"
        ),
        "memory_limit": lambda: _memory_limit(root),
        "shared_memory": lambda: _file_system(root / "dev/shm"),
        "temporary_files": lambda: _file_system(Path(os.environ.get("TMPDIR", "/tmp"))),
        "limits": lambda: [f"{name}: {_limit(name)}" for name in _LIMITS] + _low_limits(),
        "container": lambda: _container(root),
    }


def _distribution(root: Path) -> str:
    text = (root / "etc/os-release").read_text(encoding="utf-8")
    name = re.search(r'^PRETTY_NAME="?(.*?)"?$', text, re.MULTILINE)
    return name[1] if name else "no name"


def _field(path: Path, names: str) -> str:
    found = re.search(rf"^(?:{names})\s*:\s*(.*)$", path.read_text(), re.MULTILINE)
    return found[1] if found else "no name"


def _kibibytes(root: Path, name: str) -> str:
    kibibytes, _, _ = _field(root / "proc/meminfo", name).partition(" ")
    return in_units(int(kibibytes) * 1024)


def _memory_limit(root: Path) -> str:
    """The smallest of the cgroups that this process is in."""
    limits = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        name = "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            mount, name = mount / "memory", "memory.limit_in_bytes"
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            if place == mount.parent:
                break
            if (place / name).is_file():
                text = (place / name).read_text().strip()
                # The first version of cgroups says "none" by a huge number.
                if text.isdecimal() and int(text) < 1 << 60:
                    limits.append(int(text))
    return in_units(min(limits)) if limits else "none by cgroups"


def _file_system(folder: Path) -> str:
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    return f"{in_units(free)} free of {in_units(size)} in {folder}"


def _limit(name: str) -> str:
    def shown(value: int) -> str:
        if value == resource.RLIM_INFINITY:
            return "no limit"
        return in_units(value) if name in _BYTE_LIMITS else str(value)

    soft, hard = resource.getrlimit(_LIMITS[name])
    return shown(soft) if soft == hard else f"{shown(soft)}, may be raised to {shown(hard)}"


def _low_limits() -> list[str]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= LEAST:
        return []
    return [
        f"files are too few for a pool's processes: {LEAST} or more are recommended; raise the "
        f"hard limit (ulimit -Hn, LimitNOFILE of a systemd unit)"
    ]


def _container(root: Path) -> str:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return "yes"
    return "yes, Kubernetes" if os.environ.get("KUBERNETES_SERVICE_HOST") else "no sign of one"


def in_units(count: int) -> str:
    """Bytes for people: "23.5 GiB"."""
    power = min(max(0, count.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"
