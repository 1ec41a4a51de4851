# SPDX-License-Identifier: Apache-2.0
"""The resources of a single process, from /proc: CPU time by thread, page faults, memory, files,
addresses."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """The CPU time of all its threads, in exact nanoseconds. Threads that have ended are not
    counted."""
    return sum(cpu_s_of_threads(pid).values())


def cpu_s_of_threads(pid: int) -> dict[str, float]:
    """By the threads' names; threads of one name together."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # it ended meanwhile
        found[name] = found.get(name, 0.0) + nanoseconds / 1e9
    return found


def minor_faults(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 2 :].split()[7])


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pss_bytes(pid: int) -> int:
    """Its memory; each shared page counts in proportion to the processes that map it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def private_bytes(pid: int) -> int:
    """Its memory that no other process has mapped: in a forked process, its private part."""
    total_kb = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total_kb += int(line.split()[1])
    return total_kb * 1024


def fd_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def listening_addresses(pid: int) -> list[str]:
    """The addresses at which it listens over TCP or UDP, in the kernel's digits:
    "0100007F:1F90"."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            is_listening = fields[3] == "0A" or table.startswith("udp")
            if is_listening and fields[9] in inodes:
                found.append(fields[1])
    return found
