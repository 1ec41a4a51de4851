# SPDX-License-Identifier: Apache-2.0
"""Recording the visits of torch's loader, which stays as it is.

Its iterators are watched by replacing methods of their classes with functions that call them and
note their results: the indices that they pull, and the number of each batch that they deliver.
No random number is drawn and nothing is reordered, so the stream is bit-for-bit identical.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import _pool
from penstock.compat.iterators import (
    BaseIterator,
    DatasetKind,
    MultiProcessingIterator,
    SingleProcessIterator,
)
from penstock.loader.loader_run import run_of
from penstock.loader.visit_log import StreamFacts, VisitLog, VisitWriter, row_count
from penstock.loader.watched_steps import loader_watchers
from penstock.ranks.sharding import JobRank

_EPOCH = "_penstock_visits"  # the attribute of an iterator


class LoaderFolders:
    """The folders of the loaders of a program, numbered by their first ``iter()``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def next(self) -> Path:
        self._count += 1
        return self._folder / f"loader-{self._count - 1}"


def record_all(folder: Path, *, keeps_torch: bool) -> None:
    """Record the visits of all loaders that the program makes from now on, each in a separate
    folder in ``folder``: penstock's, and torch's with ``keeps_torch``."""
    folders = LoaderFolders(folder)
    owner_pid = os.getpid()

    def record(loader: Any) -> None:
        if os.getpid() == owner_pid:
            run_of(loader).visits = VisitLog(folders.next)

    loader_watchers.add(record)
    if keeps_torch:
        TorchVisits(folders).install()


class _Stream:
    """The record of one loader."""

    def __init__(self, index_sampler: Any, folder: Path) -> None:
        self.index_sampler = index_sampler  # kept, since it is known by its identity
        self._folder = folder
        self._writer: VisitWriter | None = None
        self._next_epoch = 0

    def begin_epoch(self, iterator: Any) -> _Epoch:
        is_map = iterator._dataset_kind == DatasetKind.Map
        flags = _pool.VISIT_HAS_NO_PLACE
        if getattr(iterator, "_in_order", True):
            flags |= _pool.VISIT_IN_ORDER
        facts = StreamFacts.of(
            iterator._dataset,
            self.index_sampler if is_map else None,
            is_batched=iterator._auto_collation,
            loader="torch.utils.data.DataLoader",
            title=type(iterator._dataset).__name__,
            job=JobRank.of(None, None),
            flags=flags,
        )
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = VisitWriter(self._folder, facts)
        else:
            self._writer.note_facts(facts)
        self._next_epoch += 1
        return _Epoch(self._writer, self._next_epoch - 1, iterator._sampler_iter, is_map)


class _Epoch:
    """One epoch of an iterator."""

    def __init__(self, writer: VisitWriter, number: int, sampler_iter: Any, is_map: bool) -> None:
        self.sampler_iter = sampler_iter  # each epoch has another one
        self.pulled: dict[int, Any] = {}  # indices by the number of their batch
        self.received = self.number_to_deliver = 0  # batches
        self._writer = writer
        self._number = number
        self._is_map = is_map
        self._step_count = 0
        self._is_over = False

    def deliver(self, batch: Any) -> None:
        step = self.number_to_deliver
        self._step_count = max(self._step_count, step + 1)
        if self._is_map:
            self._writer.append(self._number, step, self.pulled.pop(step))
        else:
            count = row_count(batch)
            self._writer.native.append_unknown(self._number, self._step_count - 1, count)

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._writer.native.end_epoch(self._number, self._step_count)


class TorchVisits:
    """The watch over torch's iterators of this process, from install() on."""

    def __init__(self, folders: LoaderFolders) -> None:
        self._folders = folders
        self._streams: list[_Stream] = []
        self._owner_pid = os.getpid()

    def install(self) -> None:
        self._replace(BaseIterator, "_next_index", self._next_index)
        self._replace(SingleProcessIterator, "_next_data", self._next_data)
        self._replace(MultiProcessingIterator, "_next_data", self._next_data)
        self._replace(MultiProcessingIterator, "_get_data", self._get_data)
        self._replace(MultiProcessingIterator, "_process_data", self._process_data)

    def _replace(self, kind: Any, name: str, watch: Callable[..., Any]) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def watched(iterator: Any, *arguments: Any) -> Any:
            call = functools.partial(original, iterator, *arguments)
            # Iterators of penstock record themselves; a forked child has no record.
            if type(iterator).__module__.startswith("penstock.") or os.getpid() != self._owner_pid:
                return call()
            return watch(iterator, call)

        setattr(kind, name, watched)

    def _epoch_of(self, iterator: Any) -> _Epoch:
        epoch: _Epoch | None = vars(iterator).get(_EPOCH)
        if epoch is None or epoch.sampler_iter is not iterator._sampler_iter:
            sampler = iterator._index_sampler
            stream = next((one for one in self._streams if one.index_sampler is sampler), None)
            if stream is None:
                stream = _Stream(sampler, self._folders.next())
                self._streams.append(stream)
            epoch = stream.begin_epoch(iterator)
            vars(iterator)[_EPOCH] = epoch
        return epoch

    def _next_index(self, iterator: Any, call: Callable[[], Any]) -> Any:
        index = call()
        epoch = self._epoch_of(iterator)
        number = getattr(iterator, "_send_idx", None)  # with workers, which are asked ahead
        if number is None:
            number = epoch.received
            epoch.received += 1
            epoch.number_to_deliver = number
        # The sampler may fill the same list again.
        epoch.pulled[number] = index.copy() if type(index) is list else index
        return index

    def _get_data(self, iterator: Any, call: Callable[[], Any]) -> Any:
        answer = call()
        self._epoch_of(iterator).received = answer[0]
        return answer

    def _process_data(self, iterator: Any, call: Callable[[], Any]) -> Any:
        epoch = self._epoch_of(iterator)
        # In order, it is the batch before the one that is expected next; else the one that came.
        in_order = getattr(iterator, "_in_order", True)
        epoch.number_to_deliver = iterator._rcvd_idx - 1 if in_order else epoch.received
        return call()

    def _next_data(self, iterator: Any, call: Callable[[], Any]) -> Any:
        epoch = self._epoch_of(iterator)
        try:
            batch = call()
        except StopIteration:
            epoch.end()
            raise
        epoch.deliver(batch)
        return batch
