# SPDX-License-Identifier: Apache-2.0
"""The warm process of a pool's worker, from which the processes of jobs are forked: it has imported
what each of them needs, runs nobody's code, and has no key of the pool.

None of its own code has a second thread, so that a fork has all of it.
"""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock import _C
from penstock.pool.descriptor_limit import raise_descriptor_limit
from penstock.pool.job_isolation import IsolatedJobs, JobIsolation
from penstock.pool.job_process import run_job
from penstock.pool.pool_log import PoolLog
from penstock.pool.process_settings import ProcessState
from penstock.pool.process_setup import about_worker, ignore_end_signals, set_up_process
from penstock.seams.iterators import torch_collate


@dataclass(frozen=True, slots=True)
class WarmSettings:
    code_root: str  # a folder for the modules of jobs, of which each has one of its own there
    is_quiet: bool  # whether the processes of jobs log trouble only
    isolation: dict[str, Any] = field(default_factory=dict)  # of a JobIsolation


def run_warm(settings: dict[str, Any], channel_fd: int) -> int:
    """Forks a process whenever the server at the other end of the channel asks for one; returns the
    exit code once the server is gone, and all of these processes with it."""
    warm = _WarmProcess(_C.WarmChannel.open(channel_fd), WarmSettings(**settings))
    set_up_process()
    ignore_end_signals()  # the server ends this process
    raise_descriptor_limit()
    # Python warns where there are threads: numpy's library has some, and sees to them at a fork.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=re.escape(__name__))
    _load_what_is_loaded_late()
    # The collector would write to every object that there was at the fork, and the system would
    # copy its page.
    gc.collect()
    gc.freeze()
    warm.run()
    return 0


def _load_what_is_loaded_late() -> None:
    """Calls what imports or builds something when it is called first, so that it has been by the
    time of a fork."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch_collate.default_collate([(torch.zeros(2), np.zeros(2), 0, 0.0, "")] * 2)
    ProcessState.now()


class _WarmProcess:
    def __init__(self, channel: _C.WarmChannel, settings: WarmSettings) -> None:
        self._channel = channel
        self._settings = settings
        self._pid = os.getpid()
        self._isolated = IsolatedJobs(JobIsolation(**settings.isolation), settings.code_root)

    def run(self) -> None:
        self._channel.ready(about_worker(os.getppid()))
        while (news := self._channel.next()) is not None:
            if isinstance(news, _C.JobEnd):
                self._isolated.clear(news.job)
                shutil.rmtree(self._folder_of(news.job), ignore_errors=True)
            else:
                self._fork(news)
        self._isolated.close()

    def _fork(self, order: _C.JobOrder) -> None:
        folder = self._folder_of(order.job)
        place = self._isolated.try_prepare(order.job, folder, PoolLog(order.log_name).tell)
        pid = _try_fork(order.log_name) if place else None
        if pid == 0 and place:
            self._isolated.close_in_child()
            is_quiet = self._settings.is_quiet
            run_job(self._channel, order, self._pid, folder, place, is_quiet=is_quiet)
        if not pid:
            self._isolated.clear(order.job)
        os.close(order.fd)
        os.close(order.error_fd)
        self._channel.started(order.job, pid or 0)

    def _folder_of(self, job: int) -> str:
        return os.path.join(self._settings.code_root, f"job-{job}")


def _try_fork(log_name: str) -> int | None:
    """As os.fork(); None where the system refuses, which is said."""
    try:
        return os.fork()
    except (OSError, MemoryError) as error:
        PoolLog(log_name).tell(
            f"the process of a job could not be started ({error}); the system has to have memory "
            f"and process numbers left"
        )
        return None
