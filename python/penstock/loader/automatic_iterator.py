# SPDX-License-Identifier: Apache-2.0
"""Iterator of ``num_workers="auto"``: replaces its pool when another worker count is chosen."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

from torch.utils.data import DataLoader

from penstock.compat.iterators import DatasetKind
from penstock.loader.loader_run import LoaderRun, run_of
from penstock.loader.local_iterator import LocalPoolIter
from penstock.loader.options import LoaderOptions
from penstock.stream.progress import GeneratorSnapshot, PullsReplayed
from penstock.tuning.worker_tuner import AutomaticCount


class AutomaticPoolIter(LocalPoolIter):
    """Iterator that measures its deliveries; the loader's tuner chooses the number of workers.

    With a map-style dataset, a new number takes effect immediately, in the middle of an epoch: the
    batches that were requested and not yet delivered are requested again from the new workers,
    which make the same batches. An iterable dataset would have to be read again up to that place,
    and batches in free order are not counted in sequence: there, the next epoch uses the new
    number.

    The trainer's draws do not depend on when a pool is replaced: a sampler continues from its
    place, and a native index stream is restarted with the generators as they were before.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        options = LoaderOptions.of(loader)
        self._loader = weakref.ref(loader)
        self._stretch = object()  # key of this pool's measurements in the meter
        self._is_replaceable = options.is_map and bool(options.in_order)
        # The number of batches to request from the new workers.
        self._reissued: deque[Any] = deque()
        self._ahead_s = 0.0  # waited while looking ahead, since the last batch
        super().__init__(loader)

    def _open_source(self, options: LoaderOptions, run: LoaderRun) -> None:
        self._num_workers = int(self._num_workers)  # datasets get a plain int
        super()._open_source(options, run)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self._end_stretch()
        self._reissued.clear()
        count = loader.num_workers
        if isinstance(count, AutomaticCount) and count != self._num_workers:
            self._progress.point = None  # of a finished epoch
            self._replace_pool(loader)
        super()._reset(loader, first_iter)

    def _begin_requests(self) -> None:
        self._answers_until_measured = self._num_workers  # each has started by then
        loader = self._loader()
        if self._recipe is not None and loader is not None:
            self._before_pulls = GeneratorSnapshot.take(loader)
        super()._begin_requests()

    def _next_index(self) -> Any:
        return self._reissued.popleft() if self._reissued else super()._next_index()

    def _next_data(self) -> Any:
        loader = self._measured_loader()
        if loader is not None and loader.num_workers != self._num_workers and self._can_replace():
            self._continue_with_new_pool(loader)
        # Waiting for batches that are looked at ahead is waiting for batches, only called
        # elsewhere.
        called_at = time.monotonic() - self._ahead_s
        self._ahead_s = 0.0
        answered_count = self._progress.answered_count
        try:
            return super()._next_data()
        finally:
            if self._progress.answered_count > answered_count:
                self._note_answer(called_at)
            elif self._progress.is_finished:
                self._end_stretch()

    def _take_ahead(self, batch_count: int) -> None:
        called_at = time.monotonic()
        try:
            super()._take_ahead(batch_count)
        finally:
            self._ahead_s += time.monotonic() - called_at

    def _guaranteed_workers(self) -> tuple[int, str]:
        return 1, 'num_workers="auto", which may choose 1'

    def _note_answer(self, called_at: float) -> None:
        loader = self._measured_loader()
        if loader is None:
            return
        self._answers_until_measured -= 1
        tuner = run_of(loader).tuner
        if tuner.has_stretch(self._stretch):
            tuner.meter.note(called_at, time.monotonic())
            if tuner.is_due(self._num_workers):
                tuner.end_stretch(self.source.counters())
                self._choose(loader)
        elif self._answers_until_measured <= 0 and loader.num_workers == self._num_workers:
            pids = [worker.pid for worker in self._workers]
            tuner.begin_stretch(self._stretch, self._num_workers, self.source.counters(), pids)

    def _end_stretch(self) -> None:
        loader = self._loader()
        if loader is not None and run_of(loader).tuner.has_stretch(self._stretch):
            run_of(loader).tuner.end_stretch(self.source.counters())

    def _choose(self, loader: DataLoader[Any]) -> None:
        is_iterable = self._dataset_kind == DatasetKind.Iterable
        count = run_of(loader).tuner.choose(self._shard_count if is_iterable else None)
        if count != self._num_workers:
            loader.num_workers = AutomaticCount(count)

    def _measured_loader(self) -> DataLoader[Any] | None:
        """Return the loader if this is its newest iterator and chooses its number of workers."""
        loader = self._loader()
        if loader is None or run_of(loader).progress is not self._progress:
            return None
        return loader if isinstance(loader.num_workers, AutomaticCount) else None

    def _can_replace(self) -> bool:
        if not self._is_replaceable or self._shutdown:
            return False
        if self._recipe is None:
            return True
        # A native stream draws once more at its end, which it may not have reached.
        left_count = len(self._index_sampler) - self._progress.answered_count
        return left_count > self._prefetch_depth * self._num_workers + 1

    def _continue_with_new_pool(self, loader: DataLoader[Any]) -> None:
        self._replace_pool(loader)
        self._progress.share_out(self._shard_count)
        self._reissued = self._unanswered().copy()
        if self._recipe is None:
            self._begin_requests()
            return
        with PullsReplayed(self._before_pulls, loader):
            self._begin_requests()

    def _replace_pool(self, loader: DataLoader[Any]) -> None:
        count_before = self._num_workers
        self._workers_are_used = False
        self._close_source()  # first: workers must be forked while no native thread runs
        try:
            self._open_source_of(loader.num_workers, loader)
        except OSError as error:
            if loader.num_workers < count_before:
                raise
            run_of(loader).tuner.give_up(loader.num_workers, count_before, error)
            loader.num_workers = AutomaticCount(count_before)
            self._open_source_of(count_before, loader)

    def _open_source_of(self, count: int, loader: DataLoader[Any]) -> None:
        options = LoaderOptions.of(loader)
        self._num_workers = count
        self._shard_count = options.shard_count
        self._open_source(options, run_of(loader))

    def _close_source(self) -> None:
        self._end_stretch()
        super()._close_source()
