# SPDX-License-Identifier: Apache-2.0
"""Serve the jobs of a pool: the loop of a process that makes their batches (a job process, or a
worker that a trainer has started for itself), and the jobs and prefixes that it has.

``worker_init_fn`` is called once per job, with 0, since the worker's index and the number of
workers change while it serves. ``get_worker_info()`` is worker 0 of 1 for a map-style dataset; for
an iterable dataset, it has the shard index and the number of shards.

The trainer sends jobs and prefixes as blobs, once per content. Each epoch uses the dataset as its
trainer has sent it. A dataset that batches of an earlier epoch have changed, or may have changed
undetectably, is re-created from the job's blob. Each job has the process in a separate state:
settings left by one job do not affect others.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable

from penstock import _C
from penstock.errors import ClosedError, PenstockError, UnsupportedError
from penstock.pool.job_code import is_first_in_path, put_first_in_path
from penstock.pool.pool_job import JobRefused, is_of_cpp, open_factory_job, unpack_job
from penstock.pool.pool_log import JobJournal
from penstock.pool.process_settings import ProcessState
from penstock.pool.running_job import RunningJob, seeds_of
from penstock.pool.worker_errors import (
    describe_error,
    end_forked_child,
    is_shortage,
    place_of_process,
)

_NOTICE_INTERVAL_S = 0.5
_JOBS_MAX = 2  # for two loaders that a trainer uses in turn
_BLOB_WAIT_S = 60.0
_LAST_BLOB_BYTES_MAX = 16 << 20


def serve_jobs(
    server: _C.BatchServer,
    job_cache: JobCache,
    journal: JobJournal,
    warn: Callable[[str], None],
    handle_signals: Callable[[], None],
    leave: Callable[[str], None] | None = None,
) -> None:
    """Serve until the server has ended, then close ``job_cache``.

    ``warn`` is called with messages that need attention. ``handle_signals`` is called before each
    batch, since a job's modules may have set handlers. ``leave`` replaces this process by another;
    pass None if no earlier job can have run in this process.
    """
    try:
        while True:
            work = server.next(_NOTICE_INTERVAL_S)
            for notice in server.take_notices():
                warn(notice)
            if work is not None:
                _answer(server, job_cache, work, journal, handle_signals, leave)
                del work
    except ClosedError:
        journal.finish()
    finally:
        for notice in server.take_notices():
            warn(notice)
        job_cache.close()


def _answer(
    server: _C.BatchServer,
    job_cache: JobCache,
    work: _C.PoolWork,
    journal: JobJournal,
    handle_signals: Callable[[], None],
    leave: Callable[[str], None] | None,
) -> None:
    """Answer one request. Raise ClosedError only if the server has ended."""
    pid = os.getpid()
    if not job_cache.has_had_jobs:
        leave = None
    try:
        job = job_cache.job_of(work)
        job_cache.fetch_prefixes(work)
    except ClosedError:
        server.give_up()
        return
    except UnsupportedError as error:
        server.answer_error(work, *describe_error(error), None)
        return
    except BaseException as error:  # the user's code may raise anything
        end_forked_child(pid, error)
        _refuse(server, work, journal, error, leave)
        return
    handle_signals()
    journal.note_batch(work.trainer_id, job.name)
    job.answer(work)


def _refuse(
    server: _C.BatchServer,
    work: _C.PoolWork,
    journal: JobJournal,
    error: BaseException,
    leave: Callable[[str], None] | None,
) -> None:
    """Report that the job cannot start here. If memory or descriptors are short and earlier jobs
    may still hold them, another process replaces this one, so that the next job does not suffer
    from resources that an earlier job leaked."""
    reason = str(error)
    if not isinstance(error, PenstockError):
        reason = f"on this worker ({place_of_process()}), {type(error).__name__}: {error}"
    if leave is not None and is_shortage(error):
        leave(f"it could not start another job: {reason}")
    elif isinstance(error, (PenstockError, OSError, MemoryError)):
        server.decline(reason)
        journal.note_refusal(work.trainer_id, reason)
    else:
        server.answer_error(work, *describe_error(error), None)


class JobCache:
    """Confined to the thread that makes batches."""

    def __init__(self, server: _C.BatchServer, code_root: str) -> None:
        self._server = server
        self._code_root = code_root
        self._jobs: OrderedDict[bytes, RunningJob] = OrderedDict()
        self._of_worker = ProcessState.now()
        self._states: dict[bytes, ProcessState] = {}  # the process state left by each job
        self._current: bytes | None = None  # the job whose process state is active
        self._last_blob: tuple[bytes, bytes] = (b"", b"")  # of the last job, with its id
        self.has_had_jobs = False  # whether code of a job has run in this process

    def job_of(self, work: _C.PoolWork) -> RunningJob:
        """Return the job of ``work``, waiting for the trainer to send it if needed.

        Raise JobRefused if it cannot run here, UnsupportedError if the trainer no longer has it,
        ClosedError if the batch is no longer needed, or any exception of the user's code.
        """
        if not work.blobs:
            raise JobRefused(
                "a batch was requested without its job; install the same version of penstock on "
                "both"
            )
        job_id = work.blobs[0]
        job = self._jobs.get(job_id)
        if job is not None and not is_first_in_path(job.code_folders, self._code_root):
            # Another job's modules have replaced the modules that this job imported.
            self._drop(job_id)
            job = None
        if job is not None and not self._may_continue(job_id, job, work):
            self._drop(job_id)
            put_first_in_path((), self._code_root)  # so that its modules are imported again
            job = None
        if job is None:
            while len(self._jobs) >= _JOBS_MAX:  # first, since memory may not suffice for one more
                self._drop(next(iter(self._jobs)))
            began_at = time.monotonic()
            blob = self._blob_of(job_id)
            self._enter(None)
            self.has_had_jobs = True
            try:
                if is_of_cpp(blob):
                    unpacked = open_factory_job(blob, self._fetch)
                else:
                    unpacked = unpack_job(blob, self._fetch, self._code_root)
                del blob
                job = RunningJob(self._server, unpacked, seeds_of(work))
                job.begin_watch(time.monotonic() - began_at)
                job.begin_epoch(work)
            except BaseException:
                self._of_worker.restore()
                raise
            self._jobs[job_id] = job
            self._current = job_id
        self._enter(job_id)
        self._jobs.move_to_end(job_id)
        return job

    def _may_continue(self, job_id: bytes, job: RunningJob, work: _C.PoolWork) -> bool:
        """Return whether the job may continue: within its epoch, or in another epoch because it has
        not changed any state."""
        if not job.begin_epoch(work):
            return True
        self._enter(job_id)
        return job.is_unchanged()

    def _enter(self, job_id: bytes | None) -> None:
        """Restore the process state that this job left; None: the state before any job."""
        if job_id == self._current:
            return
        if self._current is not None and self._current in self._jobs:
            self._states[self._current] = ProcessState.now()
        self._current = job_id
        (self._of_worker if job_id is None else self._states[job_id]).restore()

    def _blob_of(self, job_id: bytes) -> bytes:
        """Return a job's blob. Small blobs are kept, since the next epoch may need them again."""
        kept_id, blob = self._last_blob
        if kept_id != job_id:
            blob = self._fetch(job_id)
            self._last_blob = (job_id, blob) if len(blob) <= _LAST_BLOB_BYTES_MAX else (b"", b"")
        return blob

    def fetch_prefixes(self, work: _C.PoolWork) -> None:
        """Ensure that the server has the prefixes of ``work``, except prefixes that the trainer no
        longer has: the trainer then runs them itself. Raise ClosedError as `job_of` does.
        """
        for prefix_id in work.blobs[1:]:
            if self._server.has_prefix(prefix_id):
                continue
            try:
                message = self._fetch(prefix_id)
            except UnsupportedError:
                message = b""  # not a valid prefix
            self._server.add_prefix(prefix_id, message)

    def close(self) -> None:
        for job_id in list(self._jobs):
            self._drop(job_id)

    def _drop(self, job_id: bytes) -> None:
        self._jobs.pop(job_id).close()
        self._states.pop(job_id, None)
        if self._current == job_id:
            self._current = None
            self._of_worker.restore()

    def _fetch(self, blob_id: bytes) -> bytes:
        blob = None
        while blob is None:
            blob = self._server.blob(blob_id, _BLOB_WAIT_S)
        if hashlib.sha256(blob).digest() != blob_id:
            raise PenstockError(
                "the trainer sent another part of a job than it announced; trainer and workers "
                "must run the same version of penstock"
            )
        return blob
