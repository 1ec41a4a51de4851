# SPDX-License-Identifier: Apache-2.0
"""The warm process of a pool worker, from which job processes are forked: it has imported all that
they need, runs no user code, and has no key of the pool. If it cannot be forked, it spawns them.

Its own code runs in one thread, so that a fork copies all of it. A trial fork at its start tests
whether a forked child can compute here.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import select
import shutil
import signal
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock import _C, _pool
from penstock.pool.job_isolation import JobIsolation
from penstock.pool.job_place import IsolatedJobs, JobPlace, ProxyProcess
from penstock.pool.job_process import run_job
from penstock.pool.pool_log import PoolLog
from penstock.pool.process_settings import (
    about_worker,
    ignore_end_signals,
    warm_up_libraries,
)
from penstock.pool.spawned_job import seconds_since_start, spawn_job
from penstock.worker.worker_process import set_up_process

FORK_CHECK_S_MAX = 20.0  # for the child; a busy machine takes one or two
_ELEMENTS = 1 << 17  # enough for torch to use several threads


@dataclass(frozen=True, slots=True)
class WarmSettings:
    code_root: str  # a folder for the modules of jobs, with a separate folder for each job
    is_quiet: bool  # whether job processes log only problems
    isolation: dict[str, Any] = field(default_factory=dict)  # of a JobIsolation


def run_warm(settings: dict[str, Any], channel_fd: int) -> int:
    """Fork a process whenever the server at the other end of the channel requests one. Return the
    exit code when the server has ended, and all of these processes with it."""
    warm_settings = WarmSettings(**settings)
    isolation = JobIsolation(**warm_settings.isolation)
    proxy = ProxyProcess(isolation.fields()) if isolation.hosts else None  # before the channel
    isolated = IsolatedJobs(isolation, warm_settings.code_root, proxy)
    warm = _WarmProcess(_C.WarmChannel.open(channel_fd), warm_settings, isolated, proxy)
    set_up_process()
    ignore_end_signals()  # the server ends this process
    _pool.raise_descriptor_limit()
    # Python warns about forking with threads: numpy's library has some, and handles the fork.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=re.escape(__name__))
    warm_up_libraries()
    warm.check_fork()
    # The collector would write to every object that existed at the fork, and the system would copy
    # its page.
    gc.collect()
    gc.freeze()
    return warm.run()


class _WarmProcess:
    def __init__(
        self,
        channel: _C.WarmChannel,
        settings: WarmSettings,
        isolated: IsolatedJobs,
        proxy: ProxyProcess | None,
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._pid = os.getpid()
        self._isolated = isolated
        self._proxy = proxy
        self._is_forking = True

    def check_fork(self) -> None:
        """Spawn each job if this process cannot be forked, and log that."""
        start_s = seconds_since_start()
        fault = _fork_fault()
        if fault is not None:
            self._is_forking = False
            PoolLog("penstock worker").warn(
                f"jobs are spawned, since a process cannot be forked here after it has imported "
                f"torch: a forked child {fault}; this delays each job by {start_s:.1f} s"
            )

    def run(self) -> int:
        self._channel.ready(about_worker(os.getppid()))
        while (news := self._channel.next()) is not None:
            if isinstance(news, _C.JobEnd):
                self._isolated.clear(news.job)
                shutil.rmtree(self._folder_of(news.job), ignore_errors=True)
            elif self._proxy is not None and self._proxy.has_ended:
                PoolLog("penstock worker").warn(
                    "the proxy of --job-hosts has ended; its workers restart with a new proxy"
                )
                return 1
            else:
                self._fork(news)
        self._isolated.close()
        return 0

    def _fork(self, order: _C.JobOrder) -> None:
        folder = self._folder_of(order.job)
        place = self._isolated.try_prepare(order.job, folder, PoolLog(order.log_name).warn)
        pid = self._try_start(order, folder, place) if place else None
        if pid == 0 and place:
            self._isolated.close_in_child()
            is_quiet = self._settings.is_quiet
            run_job(self._channel, order, self._pid, folder, place, is_quiet=is_quiet)
        if not pid:
            self._isolated.clear(order.job)
        os.close(order.fd)
        os.close(order.error_fd)
        self._channel.started(order.job, pid or 0)

    def _try_start(self, order: _C.JobOrder, folder: str, place: JobPlace) -> int | None:
        """Start a process; return as os.fork() does, also for a spawned process. Log a refusal of
        the system and return None."""
        try:
            if self._is_forking:
                return os.fork()
            return spawn_job(order, folder, place, is_quiet=self._settings.is_quiet)
        except (OSError, MemoryError) as error:
            PoolLog(order.log_name).warn(
                f"a job process could not be started ({error}); free memory, or raise the limit of "
                f"processes"
            )
            return None

    def _folder_of(self, job: int) -> str:
        return os.path.join(self._settings.code_root, f"job-{job}")


def _fork_fault() -> str | None:
    """Return how a forked child fails to compute with torch, as words that follow "a forked child";
    None if it computes the same as this process. Block for at most `FORK_CHECK_S_MAX`.

    A library loaded by torch or at startup may keep a forked child from computing: by a handler
    that it runs after a fork, or by threads and locks that the child inherits. A fork that the
    system refuses for the moment is not a fault: the next one may succeed.
    """
    expected = _computed()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid = os.fork()
        except (OSError, MemoryError):
            return None
        if pid == 0:
            _answer(write_fd)
        os.close(write_fd)
        write_fd = -1
        answer = _read_until(read_fd, time.monotonic() + FORK_CHECK_S_MAX)
        if answer is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        for fd in (read_fd, write_fd):
            if fd >= 0:
                os.close(fd)
    if answer is None:
        return f"did not finish a computation with torch within {FORK_CHECK_S_MAX:g} s"
    if status != 0:
        return f"ended while it computed with torch ({_ending(status)})"
    return None if answer == expected else "computed different results with torch"


def _answer(write_fd: int) -> None:
    status = 1
    try:
        torch.set_num_threads(2)  # as a dataset may; not in the parent, whose threads no child has
        os.write(write_fd, _computed())
        status = 0
    finally:
        os._exit(status)


def _computed() -> bytes:
    """Compute a hash that is bit-for-bit identical for any number of threads."""
    drawn = torch.rand(64, 64, generator=torch.Generator().manual_seed(1))
    many = torch.arange(_ELEMENTS, dtype=torch.float32)
    found = hashlib.sha256()
    for tensor in (drawn, drawn @ drawn, many * many):
        found.update(tensor.numpy().tobytes())
    return found.digest()


def _read_until(fd: int, deadline: float) -> bytes | None:
    """Read until the other end is closed; return None if the deadline passes first."""
    text = b""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not waiting.poll(left_s * 1e3):
            return None
        piece = b""
        with contextlib.suppress(InterruptedError):
            piece = os.read(fd, 4096)
        if not piece:
            return text
        text += piece


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
