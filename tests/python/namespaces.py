# SPDX-License-Identifier: Apache-2.0
"""Environments in which a process has another network, other files or less memory than the machine.

Each has unique names, requires root, and is removed when its context ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
NAME_PREFIX = "pskchaos"
Cut = Literal["link down", "black hole", "one way"]
CUTS: tuple[Cut, ...] = ("link down", "black hole", "one way")

_numbers = itertools.count()


class NotHere(Exception):
    """This machine or user cannot create the environment; the message is the reason."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise NotHere(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def need(*tools: str) -> None:
    if os.geteuid() != 0:
        raise NotHere("it takes root")
    for tool in tools:
        if shutil.which(tool) is None:
            raise NotHere(f"{tool} is not installed")


def _own_name() -> str:
    return f"{NAME_PREFIX}{os.getpid()}x{next(_numbers)}"


# ---- Networks


@dataclass(frozen=True, slots=True)
class Network:
    """Two hosts with a router between them, without any other connection."""

    name: str

    @property
    def near(self) -> Sequence[str]:
        """Return the prefix of a command on the near host."""
        return ("nsenter", f"--net=/run/netns/{self.name}n")

    @property
    def far(self) -> Sequence[str]:
        return ("nsenter", f"--net=/run/netns/{self.name}f")

    near_address = "10.123.1.2"
    far_address = "10.123.2.2"

    def cut(self, how: Cut) -> None:
        """Cut the connection. Both ends notice ``link down``. A ``black hole`` drops the packets of
        both sides, and ``one way`` only the packets to the far host."""
        router = f"{self.name}r"
        if how == "link down":
            run("ip", "-n", router, "link", "set", "far", "down")
        elif how == "black hole":
            self._forward(False)
        else:
            run("ip", "-n", router, "route", "add", "blackhole", f"{self.far_address}/32")

    def heal(self, how: Cut) -> None:
        router = f"{self.name}r"
        if how == "link down":
            run("ip", "-n", router, "link", "set", "far", "up")
        elif how == "black hole":
            self._forward(True)
        else:
            run("ip", "-n", router, "route", "del", "blackhole", f"{self.far_address}/32")

    def _forward(self, is_on: bool) -> None:
        router = f"--net=/run/netns/{self.name}r"
        run("nsenter", router, "sysctl", "-qw", f"net.ipv4.ip_forward={int(is_on)}")

    def make(self) -> None:
        for end in "nfr":
            run("ip", "netns", "add", f"{self.name}{end}")
            run("ip", "-n", f"{self.name}{end}", "link", "set", "lo", "up")
        for subnet, (side, end) in enumerate((("near", "n"), ("far", "f")), 1):
            host, router = f"{self.name}{end}", f"{self.name}r"
            run(
                *("ip", "-n", router, "link", "add", side, "type", "veth"),
                *("peer", "name", "wire", "netns", host),
            )
            run("ip", "-n", router, "address", "add", f"10.123.{subnet}.1/24", "dev", side)
            run("ip", "-n", host, "address", "add", f"10.123.{subnet}.2/24", "dev", "wire")
            run("ip", "-n", router, "link", "set", side, "up")
            run("ip", "-n", host, "link", "set", "wire", "up")
            run("ip", "-n", host, "route", "add", "default", "via", f"10.123.{subnet}.1")
        self._forward(True)

    def remove(self) -> None:
        for end in "nfr":
            with contextlib.suppress(NotHere):
                run("ip", "netns", "del", f"{self.name}{end}")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    need("ip", "nsenter", "sysctl")
    made = Network(_own_name())
    try:
        made.make()
        yield made
    finally:
        made.remove()


# ---- Memory


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Processes with a common memory limit; beyond it, the kernel kills one of them."""

    folder: Path

    def add(self, pid: int) -> None:
        """Add a process. Its future allocations count, its present memory does not."""
        with contextlib.suppress(ProcessLookupError):
            (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def kill_count(self) -> int:
        lines = (self.folder / "memory.oom_control").read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def is_empty(self) -> bool:
        return not (self.folder / "cgroup.procs").read_text()


@contextlib.contextmanager
def memory_group(bytes_max: int) -> Iterator[MemoryGroup]:
    need()
    if not (MEMORY_GROUPS / "memory.limit_in_bytes").exists():
        raise NotHere(f"{MEMORY_GROUPS} is not a hierarchy of version 1 with memory limits")
    group = MemoryGroup(MEMORY_GROUPS / _own_name())
    try:
        group.folder.mkdir()
        (group.folder / "memory.limit_in_bytes").write_text(str(bytes_max))
    except OSError as err:
        raise NotHere(f"a memory limit cannot be set: {err}") from err
    try:
        yield group
    finally:
        deadline = time.monotonic() + 10
        while not group.is_empty() and time.monotonic() < deadline:
            time.sleep(0.02)  # until the kernel has removed the killed processes
        group.folder.rmdir()


# ---- Files


@dataclass(frozen=True, slots=True)
class TinyFolder:
    """Gives processes inside a private file system of a few bytes in place of ``path``."""

    path: str
    bytes_max: int

    @property
    def within(self) -> Sequence[str]:
        mount = f"mount -t tmpfs -o size={self.bytes_max},mode=1777 tmpfs '{self.path}'"
        script = f'{mount} && exec "$@"'
        return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")

    def fill(self, pid: int) -> None:
        """Fill the file system, as seen by a process inside."""
        subprocess.run(
            ("nsenter", f"--target={pid}", "--mount", "--", "dd", "if=/dev/zero")
            + (f"of={self.path}/fills", "bs=4096"),
            capture_output=True,
            timeout=30,
        )

    def empty(self, pid: int) -> None:
        run("nsenter", f"--target={pid}", "--mount", "--", "rm", "-f", f"{self.path}/fills")


def tiny_folder(path: str, bytes_max: int = 256 << 10) -> TinyFolder:
    need("unshare", "nsenter", "mount", "dd")
    run("unshare", "--mount", "--propagation", "private", "true")
    return TinyFolder(path, bytes_max)
