# SPDX-License-Identifier: Apache-2.0
"""A worker process of a pool in which one thing is not as it should be: that of a host that
somebody has broken into, or that was set up badly.

    python altered_worker.py ALTERATION ARGUMENT CONTROLLER KEYS

The penstock that it runs is the real one, with the worker's real key.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.pool import job_versions, pool_worker, running_job, worker_process
from penstock.pool.code_folder import CodeFolder
from penstock.pool.worker_spec import PoolWorkerSpec
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
    """To programs that cannot look at their dataset: these answers, JSON, one after the other."""
    left = json.loads(answers)

    def describe(job: Any, work: Any) -> None:
        job._server.begin()
        job._server.answer(work, left.pop(0), False, None, None, 0, -1)

    running_job.RunningJob._describe = describe  # type: ignore[method-assign]


def describe_no_dataset(_: str) -> None:
    """The question is not answered before this worker is told to end."""

    def describe(job: Any, work: Any) -> None:
        signal.pause()
        job._server.answer_error(work, "RuntimeError", "it ends", None)

    running_job.RunningJob._describe = describe  # type: ignore[method-assign]


def say_another_version(version: str) -> None:
    job_versions.__version__ = version


def have_little_memory(mebibytes: str) -> None:
    """Beyond what a worker has by the time at which it serves."""
    heed_signals = pool_worker._heed_signals

    def then_set_limit(server: Any) -> None:
        heed_signals(server)
        pool_worker._heed_signals = heed_signals  # which each batch asks for again
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (int(mebibytes) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    pool_worker._heed_signals = then_set_limit


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
    )
}


if __name__ == "__main__":
    name, argument, controller, keys = sys.argv[1:]
    ALTERATIONS[name](argument)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = CodeFolder()
    spec = PoolWorkerSpec(
        bind="tcp://127.0.0.1:0",
        advertised=None,
        data_bind=None,
        data_advertised=None,
        controller=controller,
        key_folder=keys or None,
        patience_s=60.0,
        code_root=code.path,
        parent_pid=os.getppid(),
    )
    try:
        exit_code = worker_process.run_child(asdict(spec))
    finally:
        code.remove()
    sys.exit(exit_code)
