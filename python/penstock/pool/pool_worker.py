# SPDX-License-Identifier: Apache-2.0
"""A worker in one process, as started by a trainer for itself: it listens for the trainer and makes
its batches. Pool workers have several processes (:mod:`.worker_supervisor`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from penstock import _C, _pool
from penstock.pool.job_shelf import JobCache, serve_jobs
from penstock.pool.pool_log import JobJournal
from penstock.pool.process_settings import about_worker, ignore_end_signals
from penstock.pool.worker_spec import PoolWorkerSpec, arena_bytes, job_bytes
from penstock.worker.slab_collate import collate_into_slabs
from penstock.worker.worker_process import enable_stack_dump, set_up_process


def run_worker(
    spec: PoolWorkerSpec,
    code_root: str,
    started: Callable[[_C.PoolServer], None],
    warn: Callable[[str], None],
) -> None:
    """Serve until drained (by SIGTERM, SIGINT or the end of the trainer) or until the parent ends.

    A second signal ends the process immediately. ``code_root`` is a folder for the modules of jobs,
    which the caller removes. ``started`` is called when trainers can connect, and ``warn`` with
    messages that need attention. Raise PenstockError if serving cannot continue. Call it in the
    main thread of a dedicated process.
    """
    _pool.raise_descriptor_limit()
    server = _C.PoolServer.start(
        bind=spec.bind,
        advertised=spec.advertised,
        data_bind=spec.data_bind,
        data_advertised=spec.data_advertised,
        controller=spec.controller,
        key_folder=spec.key_folder,
        about=about_worker(os.getpid()),
        name=spec.name,
        arena_bytes=arena_bytes(),
        blob_bytes_max=job_bytes(),
        patience_s=spec.patience_s,
        parent_pid=spec.parent_pid,
        handover=spec.handover,
        powercap=spec.powercap,
        exit_fd=-1,
        grace_s=spec.grace_s,
    )

    def handle_signals() -> None:
        """Have the native thread drain the worker, even while the dataset is busy."""
        signal.set_wakeup_fd(server.signal_fd, warn_on_full_buffer=False)
        ignore_end_signals()

    try:
        set_up_process()
        enable_stack_dump()
        handle_signals()
        collate_into_slabs(server)
        started(server)
        job_cache = JobCache(server, code_root)
        serve_jobs(
            server, job_cache, JobJournal(lambda _: None), warn, handle_signals, server.leave
        )
    finally:
        signal.set_wakeup_fd(-1)
        server.close()
