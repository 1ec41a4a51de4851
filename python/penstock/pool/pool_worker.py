# SPDX-License-Identifier: Apache-2.0
"""The program of a pool's worker process: it makes batches for whichever trainer it is given to.

``worker_init_fn`` is called once for each job, with 0, since which worker of how many this is
changes while it serves. ``get_worker_info()`` says 0 of 1 for a map-style dataset, and for an
iterable one the shard and how many there are.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
from collections.abc import Callable

import torch

from penstock import _C
from penstock._version import __version__
from penstock.errors import ClosedError, PenstockError, UnsupportedError
from penstock.pool.descriptor_limit import raise_descriptor_limit
from penstock.pool.job_shelf import JobShelf
from penstock.pool.pool_status import spoken_numerics
from penstock.pool.worker_errors import (
    describe_error,
    end_forked_child,
    is_shortage,
    place_of_process,
)
from penstock.pool.worker_journal import WorkerJournal
from penstock.pool.worker_spec import PoolWorkerSpec
from penstock.seams.iterators import set_thread_name, set_worker_signal_handlers
from penstock.worker.arena_cap import arena_bytes, job_bytes
from penstock.worker.arrow_memory import tune_arrow_memory
from penstock.worker.slab_collate import lend_slabs_to_torch
from penstock.worker.stuck_worker import offer_stack

_NOTICE_INTERVAL_S = 0.5


def run_worker(
    spec: PoolWorkerSpec,
    started: Callable[[_C.PoolServer], None],
    tell: Callable[[str], None],
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serves until it is drained, by SIGTERM, SIGINT or the controller, or its parent is gone.

    A second signal ends the process at once. ``started`` is called when trainers can connect,
    ``tell`` with messages that need attention, and ``say`` with the others. Raises PenstockError
    when there is no use in going on. To be called by the main thread of a process that does nothing
    else.
    """
    limit_lines = raise_descriptor_limit()
    server = _C.PoolServer.start(
        bind=spec.bind,
        advertised=spec.advertised,
        data_bind=spec.data_bind,
        data_advertised=spec.data_advertised,
        controller=spec.controller,
        key_folder=spec.key_folder,
        about=_about(),
        name=spec.name,
        arena_bytes=arena_bytes(),
        blob_bytes_max=job_bytes(),
        patience_s=spec.patience_s,
        parent_pid=spec.parent_pid,
        handover=spec.handover,
        powercap=spec.powercap,
        exit_fd=spec.exit_fd,
        grace_s=spec.grace_s,
    )
    try:
        _set_up_process()
        _heed_signals(server)  # after torch, which has a handler of its own for SIGTERM
        lend_slabs_to_torch(server)
        started(server)
        for line in limit_lines:
            say(line)
        _serve(server, JobShelf(server, spec.code_root), tell, WorkerJournal(say))
    finally:
        signal.set_wakeup_fd(-1)
        server.close()


def _heed_signals(server: _C.PoolServer) -> None:
    """The native thread drains the worker, whatever the dataset does at the moment. A job's modules
    may have put handlers of their own in the place of these."""
    signal.set_wakeup_fd(server.signal_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not _leave_to_native_thread:
            signal.signal(number, _leave_to_native_thread)


def _leave_to_native_thread(*_: object) -> None:
    pass


def _set_up_process() -> None:
    set_worker_signal_handlers()
    set_thread_name("pt_data_worker")
    offer_stack()
    _C.tune_malloc()
    tune_arrow_memory()
    torch.set_num_threads(1)


def _about() -> str:
    return (
        f"{socket.gethostname()}, process {os.getpid()}, penstock {__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {spoken_numerics()}"
    )


def _serve(
    server: _C.PoolServer,
    shelf: JobShelf,
    tell: Callable[[str], None],
    journal: WorkerJournal,
) -> None:
    try:
        while True:
            work = server.next(_NOTICE_INTERVAL_S)
            for notice in server.take_notices():
                tell(notice)
            journal.note_standing(server.standing)
            if work is not None:
                _answer(server, shelf, work, journal)
                del work
    except ClosedError as error:
        journal.note_standing(server.standing)
        journal.note_end(str(error))
    finally:
        for notice in server.take_notices():
            tell(notice)
        shelf.close()


def _answer(
    server: _C.PoolServer, shelf: JobShelf, work: _C.PoolWork, journal: WorkerJournal
) -> None:
    """Raises ClosedError only when this worker has ended."""
    pid, has_had_jobs = os.getpid(), shelf.has_had_jobs
    try:
        job = shelf.job_of(work)
        shelf.fetch_prefixes(work)
    except ClosedError:
        server.give_up()
        return
    except UnsupportedError as error:
        server.answer_error(work, *describe_error(error), None)
        return
    except BaseException as error:  # whatever the user's code raises
        end_forked_child(pid, error)
        _refuse(server, work, journal, error, may_be_others_fault=has_had_jobs)
        return
    _heed_signals(server)
    journal.note_batch(work.trainer_id, job.name)
    job.answer(work)


def _refuse(
    server: _C.PoolServer,
    work: _C.PoolWork,
    journal: WorkerJournal,
    error: BaseException,
    *,
    may_be_others_fault: bool,
) -> None:
    """Says that the job cannot begin here. Where memory or descriptors are short and jobs before it
    may still have them, another process takes this one's place: the next job does not pay for what
    another has leaked."""
    reason = str(error)
    if not isinstance(error, PenstockError):
        reason = f"on this worker ({place_of_process()}), {type(error).__name__}: {error}"
    if may_be_others_fault and is_shortage(error):
        server.leave(f"it could not begin another job: {reason}")
    elif isinstance(error, (PenstockError, OSError, MemoryError)):
        server.decline(reason)
        journal.note_refusal(work.trainer_id, reason)
    else:
        server.answer_error(work, *describe_error(error), None)
