# SPDX-License-Identifier: Apache-2.0
"""Watches the loaders of a running program, changes the options of one of them or offloads a model
to it, and ends the program after enough measurements."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.compat.modules import Patch
from penstock.doctor.column_reads import TableWatch
from penstock.doctor.loader_record import LoaderRecord
from penstock.doctor.program_runs import ObservedLoader, RunRequest, RunResult
from penstock.loader.options import title_of
from penstock.loader.watched_steps import (
    WatchedStep,
    batch_views,
    loader_watchers,
    step_watchers,
)
from penstock.tracking.leaves import flatten_batch

_OUTSIDE_OF_PROGRAMS = tuple(
    os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep
    for module in (torch, sys.modules["penstock"])
)
# Where a loader was created, its dataset's class, and its length.
_Line = tuple[tuple[str, int], str, int]


class ProgramStopped(SystemExit):
    """Ends the program after enough measurements."""


class LoaderWatch:
    """A context in which the program runs. ``report`` is called with the result as soon as it is
    available. Processes started by the program are not watched."""

    def __init__(self, orders: RunRequest, report: Callable[[RunResult], None]) -> None:
        self.is_stopped = False
        self._orders = orders
        self._report = report
        self._records: dict[_Line, LoaderRecord] = {}
        self._of_loader: dict[weakref.ref[Any], LoaderRecord] = {}
        self._late = LateOffload(self._offload) if orders.offload else None
        self._tables = TableWatch()
        self._target: tuple[Any, Any] | None = None  # loader and iterator of the newest batch

    def __enter__(self) -> LoaderWatch:
        loader_watchers.add(self._note_loader)
        step_watchers.add(self._note_step)
        batch_views.add(self._view)
        if self._late is not None:
            self._late.begin()
        return self

    def __exit__(self, *_: object) -> None:
        loader_watchers.remove(self._note_loader)
        step_watchers.remove(self._note_step)
        batch_views.remove(self._view)
        self._tables.end()
        if self._late is not None:
            self._late.end()

    def result(self, reading: LoaderRecord | None = None) -> RunResult:
        """Return the results so far; this thread is in an epoch of the loader of ``reading``."""
        seen = []
        for record in self._records.values():
            found = record.observation(record is reading)
            if found is not None:
                seen.append(ObservedLoader(record.number, record.dataset, found, record.columns()))
        return RunResult(tuple(seen), is_stopped=self.is_stopped)

    def _note_loader(self, loader: Any) -> None:
        record = self._record_of(loader)
        if record.number == self._orders.loader:
            _assign(loader, self._orders.overrides)
        self._tables.begin()
        record.add_loader(loader)
        self._of_loader[weakref.ref(loader)] = record

    def _record_of(self, loader: Any) -> LoaderRecord:
        """Return the record of a loader that the current line of the program makes. Its number is
        the same in every run."""
        name = title_of(loader)
        try:
            length = len(loader.dataset)
        except Exception:
            length = -1
        line = (_line_of_program(), name, length)
        if line not in self._records:
            self._records[line] = LoaderRecord(len(self._records), name, self._orders.folder)
        return self._records[line]

    def _view(self, loader: weakref.ref[Any], batch: Any) -> Any:
        record = self._of_loader.get(loader)
        return batch if record is None else record.view(batch)

    def _note_step(self, step: WatchedStep, iterator: Any, batch: Any) -> None:
        record = self._of_loader.get(step.loader)
        if record is None:
            return
        if self.is_stopped:
            raise ProgramStopped(0)
        record.note(step, iterator, batch)
        if not step.has_batch:
            return
        if self._late is not None and record.number == self._orders.loader:
            self._target = (step.loader(), iterator)
            self._late.note(batch)
        if record.is_done(self._orders.steps, self._orders.seconds):
            self.is_stopped = True
            self._report(self.result(record))
            if threading.current_thread() is not threading.main_thread():
                _thread.interrupt_main()  # it may be waiting for this thread's next result
            raise ProgramStopped(0)

    def _offload(self, model: Any) -> None:
        from penstock.cut.offloading import offload  # imports Dynamo

        assert self._target is not None
        loader, iterator = self._target
        offload(model, loader)
        begin_delivery = getattr(iterator, "begin_delivery", None)
        if begin_delivery is not None:  # marks the next batches of this epoch for the model
            begin_delivery(loader)


class BatchBound:
    """A context in which the program runs until its loaders have delivered more than ``count_max``
    batches."""

    def __init__(self, count_max: int) -> None:
        self.is_reached = False
        self._count_max = count_max
        self._count = 0

    def __enter__(self) -> BatchBound:
        step_watchers.add(self._note_step)
        return self

    def __exit__(self, *_: object) -> None:
        step_watchers.remove(self._note_step)

    def _note_step(self, step: WatchedStep, *_: Any) -> None:
        self._count += step.has_batch
        if self._count > self._count_max:
            self.is_reached = True
            raise ProgramStopped(0)


def _line_of_program() -> tuple[str, int]:
    """Return the current line of the program, or of one of its libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE_OF_PROGRAMS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _assign(loader: Any, overrides: Mapping[str, Any]) -> None:
    """Assign options before the first ``iter()``, which checks them."""
    if overrides.get("num_workers") == 0 and loader.pool is None:
        overrides = {**overrides, "prefetch_factor": None, "persistent_workers": False}
    for name, value in overrides.items():
        if name == "persistent_workers":
            vars(loader)[name] = value  # torch forbids the assignment
        else:
            setattr(loader, name, value)


class LateOffload:
    """Watches model calls until one takes a tensor of a batch, and calls ``found`` with that model
    before it runs. Confined to the process that creates it."""

    def __init__(self, found: Callable[[torch.nn.Module], None]) -> None:
        self._found = found
        self._pid = os.getpid()
        self._patch: Patch | None = None
        self._leaves: set[int] = set()
        self._batch: Any = None  # keeps the tensors alive whose ids are noted
        self._is_on = False

    def begin(self) -> None:
        watch = self

        def watched(call: Any) -> Any:
            def watched_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                if watch._is_on and os.getpid() == watch._pid and watch._is_of_batch(args, kwargs):
                    if next(self.parameters(), None) is not None:
                        watch.end()
                        watch._found(self)
                        return self(*args, **kwargs)
                return call(self, *args, **kwargs)

            return watched_call

        self._is_on = True
        self._patch = Patch(torch.nn.Module, "__call__", watched)

    def end(self) -> None:
        if self._patch is not None:
            self._is_on = False
            self._patch.undo()
            self._patch = None
            self._batch, self._leaves = None, set()

    def note(self, batch: Any) -> None:
        """Take a batch that the loader has delivered to the program."""
        if self._is_on:
            self._batch = _tensors(batch)
            self._leaves = {id(leaf) for leaf in self._batch}

    def _is_of_batch(self, args: Any, kwargs: Any) -> bool:
        return any(id(tensor) in self._leaves for tensor in _tensors((args, kwargs)))


def _tensors(value: Any) -> list[torch.Tensor]:
    try:
        return flatten_batch(value)
    except (AttributeError, RecursionError):
        return []
