# SPDX-License-Identifier: Apache-2.0
"""The process of a job: forked for one trainer of a pool worker, it makes that trainer's batches
and ends with the job. Jobs therefore share no process state, and damage that a dataset does to its
process affects only that job.

It has no key of the pool, and no socket except the one to its server.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from typing import NoReturn

import numpy as np
import torch

from penstock import _C
from penstock.pool.job_place import JobPlace
from penstock.pool.job_shelf import JobCache, serve_jobs
from penstock.pool.pool_log import JobJournal, PoolLog
from penstock.pool.process_settings import ignore_end_signals
from penstock.pool.worker_spec import arena_bytes
from penstock.worker.slab_collate import collate_into_slabs


def run_job(
    warm: _C.WarmChannel,
    order: _C.JobOrder,
    warm_pid: int,
    code_root: str,
    place: JobPlace | None,
    *,
    is_quiet: bool,
) -> NoReturn:
    """Serve until the job has ended, in a process that ``warm_pid`` has just started; then end the
    process. The interpreter's normal exit would run exit handlers of the dataset and wait for its
    threads. Without a ``place``, the process has already entered it."""
    status = 1
    try:
        for stream_fd in (1, 2):  # the server reads both, and sees their end when this one ends
            os.dup2(order.error_fd, stream_fd)
        os.close(order.error_fd)
        warm.close_in_child()  # from here on, this process ends with the warm one, too
        if place is not None:
            place.enter()
        _detach_from(warm_pid)
        _serve(order, code_root, is_quiet=is_quiet)
        status = 0
    except BaseException:  # also exceptions raised by a signal handler of the dataset
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _detach_from(warm_pid: int) -> None:
    """Separate this process from all state that it shares with the processes of other jobs."""
    os.setsid()  # so that all processes started by the dataset can be ended with this one
    if os.getppid() != warm_pid:
        os._exit(1)  # the warm process has ended meanwhile, and so has the server
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing != 0:
        os.close(nothing)
    # Drawn once per process, and therefore not again after a fork.
    multiprocessing.current_process().authkey = os.urandom(32)
    np.random.seed()
    torch.seed()


def _serve(order: _C.JobOrder, code_root: str, *, is_quiet: bool) -> None:
    log = PoolLog(order.log_name, is_quiet=is_quiet)
    server = _C.JobServer.open(order.fd, arena_bytes())
    collate_into_slabs(server)
    job_cache = JobCache(server, code_root)
    serve_jobs(server, job_cache, JobJournal(log.info), log.warn, ignore_end_signals)
