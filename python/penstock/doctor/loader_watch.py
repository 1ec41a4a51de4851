# SPDX-License-Identifier: Apache-2.0
"""Watches the loaders of a running program, changes the options of one of them or offloads a model
to it, and ends the program after enough measurements."""

from __future__ import annotations

import _thread
import functools
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from penstock.compat.iterators import BaseIterator
from penstock.compat.modules import Patch
from penstock.doctor.loader_record import LoaderRecord
from penstock.doctor.program_runs import ObservedLoader, RunRequest, RunResult
from penstock.loader import dataloader
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
        self._pid = os.getpid()
        self._records: dict[_Line, LoaderRecord] = {}
        self._of_loader: weakref.WeakKeyDictionary[Any, LoaderRecord] = weakref.WeakKeyDictionary()
        self._of_iterator: weakref.WeakKeyDictionary[Any, LoaderRecord] = (
            weakref.WeakKeyDictionary()
        )
        self._loader_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._patches: list[Patch] = []
        self._late = LateOffload(self._offload) if orders.offload else None
        self._target: tuple[Any, Any] | None = None  # loader and iterator of the newest batch

    def __enter__(self) -> LoaderWatch:
        watch, loader = self, dataloader.DataLoader
        init: Any = loader.__init__
        iterate: Any = loader.__iter__
        advance: Any = BaseIterator.__next__

        @functools.wraps(init)
        def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
            if os.getpid() != watch._pid:
                return init(self, *args, **kwargs)  # type: ignore[no-any-return]
            record = watch._record_of(init, self, args, kwargs)
            if watch._orders.loader == record.number and watch._orders.overrides:
                args, kwargs = _with_overrides(init, self, args, kwargs, watch._orders.overrides)
            init(self, *args, **kwargs)
            record.add_loader(self)
            watch._of_loader[self] = record

        def watched_iter(self: Any) -> Any:
            began_at = time.monotonic()
            iterator = iterate(self)
            record = watch._of_loader.get(self)
            if record is not None and os.getpid() == watch._pid:
                watch._of_iterator[iterator] = record
                watch._loader_of[iterator] = weakref.ref(self)
                record.begin_epoch(self, iterator, began_at)
            return iterator

        def watched_next(self: Any) -> Any:
            record = watch._of_iterator.get(self)
            if record is None or os.getpid() != watch._pid:
                return advance(self)
            if watch.is_stopped:
                raise ProgramStopped(0)
            cpu_s, called_at = time.thread_time(), time.monotonic()
            try:
                batch = advance(self)
            except StopIteration:
                record.end_epoch(self)
                raise
            returned_at = time.monotonic()
            record.note(self, (called_at, returned_at, time.thread_time() - cpu_s), batch)
            watch._note(self, record, batch)
            return batch

        self._patches = [
            Patch(loader, "__init__", lambda _: watched_init),
            Patch(loader, "__iter__", lambda _: watched_iter),
            Patch(BaseIterator, "__next__", lambda _: watched_next),
        ]
        if self._late is not None:
            self._late.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.undo()
        if self._late is not None:
            self._late.end()

    def result(self, iterator: Any = None) -> RunResult:
        """Return the results so far; ``iterator`` is the one that is being read."""
        reading = self._of_iterator.get(iterator) if iterator is not None else None
        seen = []
        for record in self._records.values():
            found = record.observation(iterator if record is reading else None)
            if found is not None:
                seen.append(ObservedLoader(record.number, record.dataset, found))
        return RunResult(tuple(seen), is_stopped=self.is_stopped)

    def _record_of(
        self, init: Callable[..., None], loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LoaderRecord:
        """Return the record of a loader that is about to be created. Its number is the same in
        every run."""
        try:
            arguments = inspect.signature(init).bind(loader, *args, **kwargs).arguments
        except TypeError:
            arguments = {}  # the call raises this error
        dataset = arguments.get("dataset")
        name = type(dataset).__name__
        try:
            length = len(dataset)  # type: ignore[arg-type]
        except Exception:
            length = -1
        line = (_line_of_program(), name, length)
        if line not in self._records:
            self._records[line] = LoaderRecord(len(self._records), name, self._orders.folder)
        return self._records[line]

    def _note(self, iterator: Any, record: LoaderRecord, batch: Any) -> None:
        if self._late is not None and record.number == self._orders.loader:
            self._target = (self._loader_of[iterator](), iterator)
            self._late.note(batch)
        if record.is_done(self._orders.steps, self._orders.seconds):
            self.is_stopped = True
            self._report(self.result(iterator))
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
    """A context in which the program runs until its loaders have delivered ``count_max``
    batches."""

    def __init__(self, count_max: int) -> None:
        self.is_reached = False
        self._count_max = count_max
        self._patch: Patch | None = None

    def __enter__(self) -> BatchBound:
        bound, pid = self, os.getpid()
        count = 0

        def counted(advance: Any) -> Any:
            def counted_next(self: Any) -> Any:
                nonlocal count
                if os.getpid() == pid:
                    count += 1
                    if count > bound._count_max:
                        bound.is_reached = True
                        raise ProgramStopped(0)
                return advance(self)

            return counted_next

        self._patch = Patch(BaseIterator, "__next__", counted)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._patch is not None
        self._patch.undo()


def _line_of_program() -> tuple[str, int]:
    """Return the current line of the program, or of one of its libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE_OF_PROGRAMS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _with_overrides(
    init: Callable[..., None],
    loader: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    overrides: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a loader's arguments with the overrides."""
    try:
        bound = inspect.signature(init).bind(loader, *args, **kwargs)
    except TypeError:
        return args, kwargs  # the call raises this error
    bound.arguments.update(overrides)
    arguments = bound.arguments
    del arguments[next(iter(arguments))]  # self
    if arguments.get("num_workers") == 0:
        arguments.pop("prefetch_factor", None)
        arguments.pop("persistent_workers", None)
    return (), dict(arguments)


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
