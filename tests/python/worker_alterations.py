# SPDX-License-Identifier: Apache-2.0
"""What altered_worker.py changes in penstock, in the process that forks those of jobs."""

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

from penstock.pool import fork_check, job_process, job_versions, running_job
from penstock.worker import batch_pickle


class Trap:
    """Whoever unpickles it makes the folder ``witness``."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (self.witness,)


def send_pickled_batches(witness: str) -> None:
    """Whatever the trainer allows."""
    initialise = running_job.RunningJob._initialise

    def with_pickles(job: Any, *arguments: Any) -> Any:
        job._dumps = batch_pickle.dumps
        return initialise(job, *arguments)

    running_job.RunningJob._initialise = with_pickles  # type: ignore[method-assign]
    running_job._Epoch.fetch = lambda *_: Trap(witness)  # type: ignore[method-assign]


def send_pickled_states(witness: str) -> None:
    running_job._Epoch.state = lambda *_: pickle.dumps(Trap(witness))  # type: ignore[method-assign]


def send_pickled_errors(witness: str) -> None:
    """With the name of a function that would run it."""
    text = pickle.dumps(Trap(witness), 0).decode("latin-1")
    running_job.describe_error = lambda _: ("pickle.loads", text)  # type: ignore[attr-defined]
    running_job._Epoch.fetch = _fail  # type: ignore[method-assign]


def send_errors_that_end_programs(names: str) -> None:
    """One name after the other."""
    left = names.split()
    running_job.describe_error = lambda _: (left.pop(), "bye")  # type: ignore[attr-defined]
    running_job._Epoch.fetch = _fail  # type: ignore[method-assign]


def end_shards_from(sequence: str) -> None:
    """Answer that the shard has ended, from this batch on, whatever the dataset is."""
    make = running_job.RunningJob.answer

    def then_end(job: Any, work: Any) -> None:
        if work.sequence < int(sequence):
            make(job, work)
        else:
            job._server.answer_end(work)

    running_job.RunningJob.answer = then_end  # type: ignore[method-assign]


def describe_datasets_as(answers: str) -> None:
    """To programs that cannot look at their dataset: these answers, JSON, one after the other, for
    each of which there is another process."""
    left = json.loads(answers)
    told_count = mmap.mmap(-1, 1)

    def describe(job: Any, work: Any) -> None:
        job._server.begin()
        told_count[0] += 1
        job._server.answer(work, left[told_count[0] - 1], False, None, None, 0, -1)

    running_job.RunningJob._describe = describe  # type: ignore[method-assign]


def describe_no_dataset(_: str) -> None:
    """The question is not answered for as long as somebody asks it."""

    def describe(job: Any, work: Any) -> None:
        while job._server.is_wanted:
            time.sleep(0.05)
        job._server.give_up()

    running_job.RunningJob._describe = describe  # type: ignore[method-assign]


def say_another_version(version: str) -> None:
    job_versions.__version__ = version


def have_little_memory(mebibytes: str) -> None:
    """Beyond what the process of a job has by the time at which it serves."""
    serve_jobs = job_process.serve_jobs

    def with_limit(*arguments: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (int(mebibytes) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        serve_jobs(*arguments)

    job_process.serve_jobs = with_limit


def refuse_forks(count: str) -> None:
    """So many times, as a system does that has no process numbers left."""
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
    """In a child, as of a library that waits there for a thread which the child does not have; a
    look at whether there is one takes so long."""
    fork_check.SECONDS_MAX = float(seconds_max)
    os.register_at_fork(after_in_child=lambda: time.sleep(10_000))


def end_after_forks(number: str) -> None:
    """By this signal."""
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
