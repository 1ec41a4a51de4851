# SPDX-License-Identifier: Apache-2.0
"""The process of a job: forked for one trainer that a pool's worker serves, it makes the batches of
that trainer, and ends with its job. So nothing of a job meets the next one, and what a dataset does
to its process is that job's loss alone.

It has no key of the pool and no socket but the one to its server.
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
from penstock.pool.job_isolation import JobPlace
from penstock.pool.job_journal import JobJournal
from penstock.pool.job_loop import serve_jobs
from penstock.pool.job_shelf import JobShelf
from penstock.pool.pool_log import PoolLog
from penstock.pool.process_setup import ignore_end_signals
from penstock.worker.arena_cap import arena_bytes
from penstock.worker.slab_collate import lend_slabs_to_torch


def run_job(
    warm: _C.WarmChannel,
    order: _C.JobOrder,
    warm_pid: int,
    code_root: str,
    place: JobPlace | None,
    *,
    is_quiet: bool,
) -> NoReturn:
    """Serves until the job is over, in a process that ``warm_pid`` has just started, and ends it:
    the interpreter's own exit would run what the dataset has registered for it, and wait for the
    dataset's threads. Without a ``place`` the process is in it already."""
    status = 1
    try:
        for stream_fd in (1, 2):  # the server takes both, and tells their end where this one ends
            os.dup2(order.error_fd, stream_fd)
        os.close(order.error_fd)
        warm.close_in_child()  # from here on this process ends with the warm one, too
        if place is not None:
            place.enter()
        _part_from(warm_pid)
        _serve(order, code_root, is_quiet=is_quiet)
        status = 0
    except BaseException:  # also whatever a signal handler of the dataset has raised
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _part_from(warm_pid: int) -> None:
    """Leaves this process nothing that it shares with those of other jobs."""
    os.setsid()  # all that the dataset starts can be ended with this process
    if os.getppid() != warm_pid:
        os._exit(1)  # it has ended meanwhile, and so has the server
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing != 0:
        os.close(nothing)
    # Drawn once for each process, and so not again after a fork.
    multiprocessing.current_process().authkey = os.urandom(32)
    np.random.seed()
    torch.seed()


def _serve(order: _C.JobOrder, code_root: str, *, is_quiet: bool) -> None:
    log = PoolLog(order.log_name, is_quiet=is_quiet)
    server = _C.JobServer.open(order.fd, arena_bytes())
    lend_slabs_to_torch(server)
    shelf = JobShelf(server, code_root)
    serve_jobs(server, shelf, JobJournal(log.say), log.tell, ignore_end_signals)
