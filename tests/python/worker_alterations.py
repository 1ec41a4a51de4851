# SPDX-License-Identifier: Apache-2.0
"""The alterations of altered_worker.py to penstock, in the process that forks the job processes."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.pool import job_process, job_versions, running_job, warm_process
from penstock.worker import batch_pickle


class Trap:
    """Unpickling it creates the folder ``witness``."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (self.witness,)


def send_pickled_batches(witness: str) -> None:
    """Send pickles for batches, whether or not the trainer allows it."""
    initialise = running_job.RunningJob._initialise

    def with_pickles(job: Any, *arguments: Any) -> Any:
        job._dumps = batch_pickle.dumps
        return initialise(job, *arguments)

    running_job.RunningJob._initialise = with_pickles  # type: ignore[method-assign]
    running_job._Epoch.fetch = lambda *_: Trap(witness)  # type: ignore[method-assign]


def send_pickled_states(witness: str) -> None:
    running_job._Epoch.state = lambda *_: pickle.dumps(Trap(witness))  # type: ignore[method-assign]


def send_pickled_reports(witness: str) -> None:
    running_job.RunningJob._report_of = (  # type: ignore[method-assign]
        lambda *_: pickle.dumps(Trap(witness))
    )


def send_pickled_errors(witness: str) -> None:
    """Send a pickle as an error, under the name of a function that would load it."""
    text = pickle.dumps(Trap(witness), 0).decode("latin-1")
    running_job.describe_error = lambda _: ("pickle.loads", text)  # type: ignore[attr-defined]
    running_job._Epoch.fetch = _fail  # type: ignore[method-assign]


def send_errors_that_end_programs(names: str) -> None:
    """Send errors with these type names, one after the other."""
    left = names.split()
    running_job.describe_error = lambda _: (left.pop(), "bye")  # type: ignore[attr-defined]
    running_job._Epoch.fetch = _fail  # type: ignore[method-assign]


def end_shards_from(sequence: str) -> None:
    """Answer that the shard has ended, from this batch on, for any dataset."""
    make = running_job.RunningJob.answer

    def then_end(job: Any, work: Any) -> None:
        if work.sequence < int(sequence):
            make(job, work)
        else:
            job._server.answer_end(work)

    running_job.RunningJob.answer = then_end  # type: ignore[method-assign]


def describe_datasets_as(answers: str) -> None:
    """Send these answers, in JSON, to programs that cannot inspect their dataset, one after the
    other: each is sent by another process."""
    left = json.loads(answers)
    told_count = mmap.mmap(-1, 1)

    def describe(job: Any, work: Any) -> None:
        job._server.begin()
        told_count[0] += 1
        job._server.answer(work, left[told_count[0] - 1], False, None, None, 0, -1)

    running_job.RunningJob._describe = describe  # type: ignore[method-assign]


def describe_no_dataset(_: str) -> None:
    """Leave the question unanswered as long as a program asks it."""

    def describe(job: Any, work: Any) -> None:
        while job._server.is_wanted:
            time.sleep(0.05)
        job._server.give_up()

    running_job.RunningJob._describe = describe  # type: ignore[method-assign]


def say_another_version(version: str) -> None:
    job_versions.__version__ = version


def have_little_memory(mebibytes: str) -> None:
    """Limit the memory of a job process, in addition to its memory at the start of serving."""
    serve_jobs = job_process.serve_jobs

    def with_limit(*arguments: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (int(mebibytes) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        serve_jobs(*arguments)

    job_process.serve_jobs = with_limit


def refuse_forks(count: str) -> None:
    """Refuse ``count`` forks, like a system without free process ids."""
    fork = os.fork
    left = int(count)

    def refuse() -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = refuse


def hang_after_forks(seconds_max: str) -> None:
    """Hang in each forked child, like a library that waits there for a thread that the child lacks;
    the check for such hangs takes ``seconds_max``."""
    warm_process.FORK_CHECK_S_MAX = float(seconds_max)
    os.register_at_fork(after_in_child=lambda: time.sleep(10_000))


def end_after_forks(number: str) -> None:
    """End each forked child by this signal."""
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), int(number)))


def compute_wrongly_after_forks(_: str) -> None:
    def spoil() -> None:
        torch.rand = lambda *sizes, **_: torch.zeros(*sizes)  # type: ignore[assignment]

    os.register_at_fork(after_in_child=spoil)


def _fail(*_: Any) -> Any:
    raise RuntimeError


ALTERATIONS: dict[str, Callable[[str], None]] = {
    alteration.__name__: alteration
    for alteration in (
        send_pickled_batches,
        send_pickled_states,
        send_pickled_reports,
        send_pickled_errors,
        send_errors_that_end_programs,
        end_shards_from,
        describe_datasets_as,
        describe_no_dataset,
        say_another_version,
        have_little_memory,
        refuse_forks,
        hang_after_forks,
        end_after_forks,
        compute_wrongly_after_forks,
    )
}
