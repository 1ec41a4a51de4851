# SPDX-License-Identifier: Apache-2.0
"""``penstock.trace()``: a window of steps as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock._version import __version__
from penstock.loader.watched_steps import WatchedStep, add_watcher, remove_watcher
from penstock.observing.chrome_events import Place, events_of
from penstock.observing.trace_file import BASE, check_writable, write_trace
from penstock.observing.traced_step import StepWindow
from penstock.program_line import warn
from penstock.sampling.job_rank import JobRank

STEPS_MAX = 1_000_000
STEPS = 200


def trace(path: str | os.PathLike[str], *, steps: int = STEPS, skip: int = 0) -> StepTrace:
    """A block in which the steps of this process's loaders are traced.

    path: the file to be written, in Chrome's trace format (JSON), compressed if the name ends in
        ".gz". https://ui.perfetto.dev and chrome://tracing open it. Where the process is one of
        several ranks, its number is put before the name's first suffix: ``trace.rank3.json``.
    steps: batches to be traced, from 1 to 1,000,000, of all loaders together.
    skip: batches that are left out first.

    Tracks are the trainer (computing, waiting by what for, the loader's own work), each worker
    (dataset, collating, moved calls), the wire and the copy to the device. Arrows lead from a
    batch's making to the call that was given it. Counters are the batches that are ready and that
    are asked for, and megabytes a second. Batches that were made and not given in the window are
    not in it. Instants are those of the Unix clock, as torch.profiler's, so that
    :func:`penstock.merge_traces` can put both on one page.

    The file is written when ``steps`` batches were given, or else when the block ends, also by an
    exception or Ctrl-C. In the first case a file that cannot be written is a warning, so that
    training goes on. A step that is traced takes some 20 microseconds more. Loaders whose workers
    run already are traced too. Forked children are not.

    Raises ``ValueError`` for numbers out of range, and ``OSError`` at the beginning of the block
    where the file could not be written.

    Example::

        with penstock.trace("trace.json", steps=100, skip=20):
            train(model, loader)
    """
    return StepTrace(path, steps, skip)


class StepTrace:
    """What ``penstock.trace()`` returns. ``path`` is the file, once it is written, and
    ``step_count`` how many batches are in it so far."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: int,
        skip: int,
        when_written: Callable[[StepTrace], None] | None = None,
    ) -> None:
        _check_count("steps", steps, 1)
        _check_count("skip", skip, 0)
        self._asked_path = Path(path)
        self._window = StepWindow(steps, skip)
        self._when_written = when_written
        self._lock = threading.Lock()
        self._owner_pid = 0  # before the block begins
        self._is_ended = False
        self.path: Path | None = None
        self.file_bytes = 0

    @property
    def step_count(self) -> int:
        return self._window.batch_count

    def __enter__(self) -> StepTrace:
        if self._owner_pid:
            raise ValueError("this trace was begun before; penstock.trace() makes another")
        check_writable(self._asked_path.absolute())
        self._owner_pid = os.getpid()
        # What the clock of the instants shows when the Unix clock shows a whole second.
        base_s = int(time.time())
        self._unix_base_ns = base_s * 1_000_000_000
        self._base_ns = self._unix_base_ns - (time.time_ns() - time.monotonic_ns())
        add_watcher(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() == self._owner_pid and self._end():
            self._write()

    def _note(self, step: WatchedStep) -> None:
        if self._window.note(step) and self._end():
            try:
                self._write()
            except OSError as error:
                warn(f"the trace of {self.step_count} steps was not written: {error}")

    def _end(self) -> bool:
        """Whether this call ended it."""
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
        remove_watcher(self._note)
        return is_first

    def _write(self) -> None:
        job = JobRank.of(None, None)
        path = path_of_rank(self._asked_path, job)
        rank_name = f", rank {job.rank}" if job.world_size > 1 else ""
        place = Place(os.getpid(), self._base_ns, f"{_program_name()}{rank_name}")
        content: dict[str, Any] = {
            "displayTimeUnit": "ms",
            BASE: self._unix_base_ns,
            "penstock": {
                "version": __version__,
                "rank": job.rank,
                "world_size": job.world_size,
                "host": os.uname().nodename,
                "steps": self.step_count,
            },
            "traceEvents": events_of(self._window.steps(), place),
        }
        self.file_bytes = write_trace(path, content)
        self.path = path
        if self._when_written is not None:
            self._when_written(self)


def path_of_rank(path: Path, job: JobRank) -> Path:
    if job.world_size == 1:
        return path
    head, dot, tail = path.name.partition(".")
    return path.with_name(f"{head}.rank{job.rank}{dot}{tail}")


def _program_name() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"


def _check_count(name: str, count: object, least: int) -> None:
    if type(count) is not int or not least <= count <= STEPS_MAX:
        raise ValueError(
            f"{name} is {count!r}; a whole number from {least} to {STEPS_MAX} is expected"
        )
