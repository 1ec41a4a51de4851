# SPDX-License-Identifier: Apache-2.0
"""Resources of a process that outlive an object: children, descriptors, shared memory, files.

Read from /proc, so that it also sees the resources of native code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import threading
import time
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SHARED_MAPPINGS = ("memfd:", "/dev/shm/", "/SYSV")
# Python objects that a garbage collection may visit; each look spends some milliseconds on them.
WATCHED_OBJECTS_MAX = 20_000


@dataclass(frozen=True)
class Traces:
    children: frozenset[str]
    descriptors: frozenset[str]
    shared_files: frozenset[str]
    shared_mappings: frozenset[str]
    temporary_files: frozenset[str]

    def since(self, before: Traces) -> dict[str, list[str]]:
        """The new traces, by kind; empty kinds are left out."""
        new = {
            field.name: sorted(getattr(self, field.name) - getattr(before, field.name))
            for field in fields(self)
        }
        new["shared_files"] = unused_files(new["shared_files"])
        return {name: things for name, things in new.items() if things}


KINDS = frozenset(field.name for field in fields(Traces))


def take(temporary_folder: Path | None = None) -> Traces:
    return Traces(
        children=frozenset(f"{pid} {name_of(pid)}" for pid in children()),
        descriptors=frozenset(descriptors()),
        shared_files=frozenset(path.name for path in SHARED_MEMORY.iterdir()),
        shared_mappings=frozenset(shared_mappings()),
        temporary_files=frozenset(files_below(temporary_folder) if temporary_folder else ()),
    )


def left_since(
    before: Traces,
    temporary_folder: Path | None = None,
    seconds: float = 10.0,
    kinds: Collection[str] = KINDS,
) -> dict[str, list[str]]:
    """The traces of these kinds that remain after `seconds`; threads of closed queues need some
    time to end."""
    deadline = time.monotonic() + seconds
    while True:
        collect_garbage()
        join_feeder_threads()
        since = take(temporary_folder).since(before)
        left = {kind: things for kind, things in since.items() if kind in kinds}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def collect_garbage() -> None:
    """Frees unreferenced objects. The objects still held then, mostly modules that a test imported,
    are left out of every later look: looks through all of torch take 0.1 s, and each test has
    one."""
    gc.collect()
    if len(gc.get_objects()) > WATCHED_OBJECTS_MAX:
        gc.freeze()


def start_cuda() -> None:
    """On a machine with a GPU, opens the files that its driver keeps open from a process's first
    use of it.

    Torch's compiler and profiler use a GPU that the program does not use.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return  # without importing torch
    import torch

    if not torch.cuda.is_available():
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")


def children(pid: int | str = "self") -> list[int]:
    """Children of every thread of a process, zombies among them; none of one that has ended."""
    found: list[int] = []
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return found
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.extend(map(int, (task / "children").read_text().split()))
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(gone)"


def descriptors(pid: int | str = "self") -> list[str]:
    found = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(f"{entry} -> {os.readlink(f'/proc/{pid}/fd/{entry}')}")
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    return found


def unused_files(names: Iterable[str]) -> list[str]:
    """Named shared memory, except the segments in use by a living process that is not our child.

    /dev/shm is shared by the whole machine. Torch's names contain the pid of their maker:
    torch_<pid>_... Semaphores do not show who owns them; multiprocessing's resource tracker watches
    over them.
    """
    own = {os.getpid(), *children()}
    found = []
    for name in names:
        maker = re.match(r"torch_(\d+)_", name)
        in_use_elsewhere = maker and int(maker[1]) not in own and is_running(int(maker[1]))
        if not (in_use_elsewhere or name.startswith("sem.")) and (SHARED_MEMORY / name).exists():
            found.append(name)
    return found


def is_running(pid: int) -> bool:
    """Whether the process has not ended; a process that has not been waited for yet has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def files_below(folder: Path) -> list[str]:
    """All except the files that a loader does not have to remove.

    These are the cache folder of torch's compiler, made when it is first imported, and the sockets
    of killed multiprocessing children, which are removed with their folder when this process ends.
    """
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return [name for name in names if not re.match(r"torchinductor_|pymp-.*/listener-", name)]


def shared_mappings(pid: int | str = "self") -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if any(kind in line for kind in SHARED_MAPPINGS)]


def arena_mappings(pid: int | str = "self") -> list[str]:
    """The mappings of penstock's arenas: a stuck torch queue keeps its semaphores mapped for
    ever."""
    return [line for line in shared_mappings(pid) if "memfd:penstock" in line]


def native_threads(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def page_faults(pid: int | str = "self") -> int:
    """Minor faults of a process since it started."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[7])


# Feeder threads that did not end in time: the feeders of torch's queues whose reader or lock died
# with a worker never do, and every later test would wait for them again.
_stuck: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join_feeder_threads() -> None:
    """Waits for the threads of closed multiprocessing queues: they close pipes when they end."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread" and thread not in _stuck:
            thread.join(timeout=10)
            if thread.is_alive():
                _stuck.add(thread)


def wait_gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Waits until the processes have ended, whosever children they are; returns the remaining
    ones."""
    deadline = time.monotonic() + seconds
    left = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            readable, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
        if not readable:
            left.append(pid)
    return left
