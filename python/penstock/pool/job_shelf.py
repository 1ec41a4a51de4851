# SPDX-License-Identifier: Apache-2.0
"""The jobs and prefixes of a pool's worker, which it gets from its trainer as
blobs, once for each content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from penstock import _C
from penstock.errors import PenstockError, UnsupportedError
from penstock.pool.factory_job import is_of_cpp, open_factory_job
from penstock.pool.job_code import is_in_front
from penstock.pool.pool_job import JobRefused, unpack_job
from penstock.pool.running_job import RunningJob, seeds_of

_JOBS_MAX = 2  # those of two loaders that a trainer uses in turn
_BLOB_WAIT_S = 60.0


class JobShelf:
    """Confined to the thread that makes batches."""

    def __init__(self, server: _C.PoolServer, code_root: str) -> None:
        self._server = server
        self._code_root = code_root
        self._jobs: OrderedDict[bytes, RunningJob] = OrderedDict()

    def job_of(self, work: _C.PoolWork) -> RunningJob:
        """The job that ``work`` is of. Waits for the trainer to send it, if need be.

        Raises JobRefused when it cannot run here, UnsupportedError when the trainer has it no more,
        and ClosedError when nobody wants the batch any more.
        """
        if not work.blobs:
            raise JobRefused(
                "a batch is asked for without its job; install the same version of penstock on both"
            )
        job_id = work.blobs[0]
        job = self._jobs.get(job_id)
        if job is not None and not is_in_front(job.code_folders, self._code_root):
            # Another job's modules have taken the place of those that it imported.
            self._drop(job_id)
            job = None
        if job is None:
            while len(self._jobs) >= _JOBS_MAX:  # first: there may be no memory for one more
                self._drop(next(iter(self._jobs)))
            blob = self._fetch(job_id)
            if is_of_cpp(blob):
                unpacked = open_factory_job(blob, self._fetch)
            else:
                unpacked = unpack_job(blob, self._fetch, self._code_root)
            del blob
            job = self._jobs[job_id] = RunningJob(self._server, unpacked, seeds_of(work))
        self._jobs.move_to_end(job_id)
        return job

    def fetch_prefixes(self, work: _C.PoolWork) -> None:
        """Has the server have the prefixes of ``work``, but for those that the trainer does not
        have any more: the trainer then runs them itself. Raises ClosedError as `job_of`.
        """
        for prefix_id in work.blobs[1:]:
            if self._server.has_prefix(prefix_id):
                continue
            try:
                message = self._fetch(prefix_id)
            except UnsupportedError:
                message = b""  # which no prefix is
            self._server.add_prefix(prefix_id, message)

    def close(self) -> None:
        for job_id in list(self._jobs):
            self._drop(job_id)

    def _drop(self, job_id: bytes) -> None:
        self._jobs.pop(job_id).close()

    def _fetch(self, blob_id: bytes) -> bytes:
        blob = None
        while blob is None:
            blob = self._server.blob(blob_id, _BLOB_WAIT_S)
        if hashlib.sha256(blob).digest() != blob_id:
            raise PenstockError(
                "the part of a job that the trainer sent is not the one that it named; trainer and "
                "workers must run the same version of penstock"
            )
        return blob
