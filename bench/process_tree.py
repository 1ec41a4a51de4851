# SPDX-License-Identifier: Apache-2.0
"""The resources of a process and all its descendants, from /proc: CPU time, page faults, memory,
files."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import one_process

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the start of the processes, including children that ended and were waited for."""

    cpu_s: float
    minor_faults: int

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(self.cpu_s - earlier.cpu_s, self.minor_faults - earlier.minor_faults)


def usage(root_pid: int) -> Usage:
    ticks = faults = 0
    for fields in _stats_of_tree(root_pid):
        # man 5 proc_pid_stat: minflt, cminflt, utime, stime, cutime, cstime, counted after comm.
        faults += int(fields[7]) + int(fields[8])
        ticks += sum(int(field) for field in fields[11:15])
    return Usage(ticks / TICKS_PER_S, faults)


def parents(root_pid: int) -> dict[int, int]:
    """Return the parent of each descendant."""
    found = {int(fields[-1]): int(fields[1]) for fields in _stats_of_tree(root_pid)}
    found.pop(root_pid, None)
    return found


def pss_bytes(root_pid: int) -> int:
    """Memory of the tree, every shared page counted once. The kernel walks page tables for it."""
    total_bytes = 0
    for fields in _stats_of_tree(root_pid):
        try:
            total_bytes += one_process.pss_bytes(int(fields[-1]))
        except OSError:
            continue  # it ended meanwhile
    return total_bytes


def memory_bytes(root_pid: int) -> int:
    """Memory that the tree keeps from other processes: its PSS, and the pages of shared memory that
    it holds open without mapping them, as torch's loader does with batches in flight.
    """
    mapped: Counter[tuple[int, int]] = Counter()  # bytes by file
    files: dict[tuple[int, int], int] = {}
    total_bytes = 0
    for fields in _stats_of_tree(root_pid):
        try:
            maps = Path(f"/proc/{fields[-1]}/smaps").read_text()
            files |= _open_shared_memory(fields[-1])
        except OSError:
            continue  # it ended meanwhile
        file = (0, 0)
        for line in maps.splitlines():
            words = line.split()
            if not words[0].endswith(":"):  # range, permissions, offset, device, inode, path
                major, minor = words[3].split(":")
                file = (os.makedev(int(major, 16), int(minor, 16)), int(words[4]))
            elif words[0] == "Pss:":
                mapped[file] += int(words[1]) * 1024
                total_bytes += int(words[1]) * 1024
    return total_bytes + sum(max(0, size - mapped[file]) for file, size in files.items())


def _open_shared_memory(pid: str) -> dict[tuple[int, int], int]:
    """The bytes in use of each memfd and file of /dev/shm that a process has open."""
    files = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            is_memory = os.readlink(path).startswith(("/memfd:", "/dev/shm/"))
            state = os.stat(path)
        except OSError:
            continue  # it was closed meanwhile
        if is_memory:
            files[state.st_dev, state.st_ino] = state.st_blocks * 512
    return files


def open_fds(root_pid: int) -> int:
    """Descriptors that the tree has open."""
    count = 0
    for fields in _stats_of_tree(root_pid):
        try:
            count += len(os.listdir(f"/proc/{fields[-1]}/fd"))
        except OSError:
            continue  # it ended meanwhile
    return count


def machine_busy_s() -> float:
    """CPU time used by all processes of the machine, including ours."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _stats_of_tree(root_pid: int) -> list[list[str]]:
    """/proc/PID/stat of each process, from its state on, with the pid appended."""
    stats: dict[int, list[str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            stats[int(entry)] = [*text[text.rindex(")") + 2 :].split(), entry]
    reached = {root_pid}
    growing = True
    while growing:
        growing = False
        for pid, fields in stats.items():
            if pid not in reached and int(fields[1]) in reached:
                reached.add(pid)
                growing = True
    return [stats[pid] for pid in reached if pid in stats]
