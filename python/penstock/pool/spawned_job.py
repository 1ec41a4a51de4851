# SPDX-License-Identifier: Apache-2.0
"""The process of a job if it cannot be forked from the warm process: a new interpreter, which
imports torch itself and is then equivalent to a forked one.

It has the limits, the environment and the folder of the warm process, and ends as a forked one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from penstock import _C
from penstock.pool.job_place import JobPlace
from penstock.pool.job_process import run_job
from penstock.pool.process_settings import ignore_end_signals, warm_up_libraries
from penstock.worker.worker_process import set_up_process

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
settings = json.loads(sys.argv[2])
from penstock.pool.job_place import JobPlace
JobPlace(**settings.pop("place")).enter()  # while this process has one thread
from penstock.pool.spawned_job import run_spawned
run_spawned(settings)
"""


@dataclass(frozen=True, slots=True)
class SpawnedOrder:
    """A `_C.JobOrder` in a form that can be passed to another program."""

    job: int
    fd: int
    error_fd: int
    log_name: str


def spawn_job(order: _C.JobOrder, code_root: str, place: JobPlace, *, is_quiet: bool) -> int:
    """Start the process; return its id. Raise OSError if the system refuses.

    Fork handlers do not run in it.
    """
    passed = SpawnedOrder(order.job, order.fd, order.error_fd, order.log_name)
    settings = {
        "order": asdict(passed),
        "place": asdict(place),
        "warm_pid": os.getpid(),
        "code_root": code_root,
        "is_quiet": is_quiet,
    }
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), json.dumps(settings)]
    proxy_fds = () if place.proxy_fd is None else (place.proxy_fd,)
    for fd in (order.fd, order.error_fd, *proxy_fds):
        os.set_inheritable(fd, True)  # no other program is started before the caller closes them
    # Its output before it serves is logged as the job's output, too.
    streams = [(os.POSIX_SPAWN_DUP2, order.error_fd, fd) for fd in (1, 2)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=streams)


def run_spawned(settings: dict[str, object]) -> None:
    """Serve the job, and end the process."""
    order = SpawnedOrder(**settings.pop("order"))  # type: ignore[arg-type]
    for fd in (order.fd, order.error_fd):
        os.set_inheritable(fd, False)
    set_up_process()
    ignore_end_signals()
    warm_up_libraries()
    # There is no channel to close: exec closed the warm process's channel in this program.
    run_job(_C.WarmChannel.open(-1), order, place=None, **settings)  # type: ignore[arg-type]


def seconds_since_start() -> float:
    """Return the time since this process was started."""
    with open("/proc/self/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
