# SPDX-License-Identifier: Apache-2.0
"""The loop of a process that makes batches of a pool's jobs: a job process, or a worker that a
trainer has started for itself.

``worker_init_fn`` is called once per job, with 0, since the worker's index and the number of
workers change while it serves. ``get_worker_info()`` is worker 0 of 1 for a map-style dataset; for
an iterable dataset, it has the shard index and the number of shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock import _C
from penstock.errors import ClosedError, PenstockError, UnsupportedError
from penstock.pool.job_shelf import JobShelf
from penstock.pool.pool_log import JobJournal
from penstock.pool.worker_errors import (
    describe_error,
    end_forked_child,
    is_shortage,
    place_of_process,
)

_NOTICE_INTERVAL_S = 0.5


def serve_jobs(
    server: _C.BatchServer,
    shelf: JobShelf,
    journal: JobJournal,
    tell: Callable[[str], None],
    heed_signals: Callable[[], None],
    leave: Callable[[str], None] | None = None,
) -> None:
    """Serve until the server has ended, then close ``shelf``.

    ``tell`` is called with messages that need attention. ``heed_signals`` is called before each
    batch, since a job's modules may have set handlers. ``leave`` replaces this process by another;
    pass None if no earlier job can have run in this process.
    """
    try:
        while True:
            work = server.next(_NOTICE_INTERVAL_S)
            for notice in server.take_notices():
                tell(notice)
            if work is not None:
                _answer(server, shelf, work, journal, heed_signals, leave)
                del work
    except ClosedError:
        journal.finish()
    finally:
        for notice in server.take_notices():
            tell(notice)
        shelf.close()


def _answer(
    server: _C.BatchServer,
    shelf: JobShelf,
    work: _C.PoolWork,
    journal: JobJournal,
    heed_signals: Callable[[], None],
    leave: Callable[[str], None] | None,
) -> None:
    """Answer one request. Raise ClosedError only if the server has ended."""
    pid = os.getpid()
    if not shelf.has_had_jobs:
        leave = None
    try:
        job = shelf.job_of(work)
        shelf.fetch_prefixes(work)
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
    heed_signals()
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
        leave(f"it could not begin another job: {reason}")
    elif isinstance(error, (PenstockError, OSError, MemoryError)):
        server.decline(reason)
        journal.note_refusal(work.trainer_id, reason)
    else:
        server.answer_error(work, *describe_error(error), None)
