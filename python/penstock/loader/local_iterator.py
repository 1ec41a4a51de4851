# SPDX-License-Identifier: Apache-2.0
"""The iterator behind ``iter(loader)``: torch's class with penstock's transport in it.

The trainer's Python does what only it can: pull the user's sampler, start processes, raise what a
worker raised. What an epoch is, and when which batch is asked for, is the native stream's.
"""

from __future__ import annotations

import operator
import os
import pickle
import sys
import time
import warnings
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from penstock import _C
from penstock.errors import PoolWarning
from penstock.loader.device import cuda_index
from penstock.loader.held_slabs import retire_at_forks
from penstock.loader.loader_face import LoaderFace
from penstock.loader.local_workers import LocalWorkers, sleep_if_python_exits
from penstock.loader.lookahead import LooksAhead, NoBatch, Taken
from penstock.loader.native_thread import NativeThread
from penstock.loader.options import drawing_threads, is_seeded_by_batch, own_options, shard_count
from penstock.loader.prefetch_depth import prefetch_depth
from penstock.seams.iterators import (
    BaseIterator,
    DatasetKind,
    ExceptionWrapper,
    MultiProcessingIterator,
    exit_status,
    pin_memory,
)
from penstock.stream.batch_seeds import EpochSeeds, draw_seed
from penstock.stream.index_order import IndexOrder
from penstock.stream.indices import recognise_sampler
from penstock.stream.progress import CountedPulls
from penstock.stream.shard_state import is_stateful
from penstock.stream.table_rows import plain_rows
from penstock.tracking.batch_origin import BatchHandle
from penstock.worker.arena_cap import arena_bytes
from penstock.worker.batch_pickle import dumps_index, loads
from penstock.worker.fetching import FetchSpec
from penstock.worker.stuck_worker import spoken_debt
from penstock.worker.worker_main import WorkerSpec

if TYPE_CHECKING:
    from penstock.tuning.load_meter import LoadMeter

_BATCH = int(_C.Client.Event.BATCH)
_SHARD_ENDED = int(_C.Client.Event.SHARD_ENDED)
_WORKER_LOST = int(_C.Client.Event.WORKER_LOST)
_WORKER_GONE = int(_C.Client.Event.WORKER_GONE)
_END = int(_C.Client.Event.END)
_NEWS = int(_C.Client.Event.NEWS)

_STRETCH = 4  # as kStretch of the native stream
_SLABS_MAX = 64

STANDING_COUNTS = ("outstanding", "ready")  # the others only grow

_STATUS_CHECK_INTERVAL_S = (
    1.0  # how often a waiting trainer looks for a worker that died before it ever connected
)


class LocalPoolIter(LooksAhead, CountedPulls, MultiProcessingIterator):
    """Batches from workers that this process starts, in torch's order."""

    _workers: list[Any]
    _shutdown = True  # until there is something to shut down
    _is_elastic = False  # whether the number of workers may change at any time
    _any_worker = False  # whether any worker may make any batch

    def __init__(self, loader: LoaderFace) -> None:
        self._progress = loader._begin_progress()
        BaseIterator.__init__(self, cast(Any, loader))
        if self._progress.point is not None:
            self._base_seed = self._progress.point.base_seed
        self._undo_seed(loader)
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        self._owner_pid = os.getpid()
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        self._settle_num_workers(loader)
        if self._prefetch_factor is None or self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        operator.index(self._prefetch_factor)  # torch counts with it, too
        self._worker_init_fn = loader.worker_init_fn
        self._provenance = loader._provenance
        self._meter: LoadMeter | None = None
        self._prefetch_depth = prefetch_depth(loader)
        self.own_options = own_options(loader)
        self._draw_warning = loader._draw_warning
        self._drawing_threads = drawing_threads(loader)
        self._is_seeded_by_batch = is_seeded_by_batch(loader)
        self._shard_count = shard_count(loader)
        self._pin_device_index = (
            torch.accelerator.current_device_index() if self._pin_memory else None
        )
        self._gone: set[int] = set()  # workers that died and that the others do without
        self._asks_while_room = self._is_elastic or loader.prefetch_bytes is not None
        self._may_begin_early = bool(self._can_begin_early(loader))
        self._past_counters = loader._past_counters
        self._ahead = deque()
        self._asked: deque[Any] = deque()
        self._asked_first = 0
        loader._live_iterators.add(self)
        self._open_pool(loader)
        self._reset(loader, first_iter=True)

    def _settle_num_workers(self, loader: LoaderFace) -> None:
        if self._num_workers <= 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )

    def _open_pool(self, loader: LoaderFace) -> None:
        """Starts ``self._num_workers`` workers, and what is native in the trainer."""
        self._any_worker = self._may_any_worker_make_any_batch(loader)
        # A worker may have made all the batches that the trainer has, while another makes one.
        self._slab_count = self._prefetch_depth
        if self._any_worker:
            self._slab_count = min(_SLABS_MAX, _STRETCH * self._prefetch_depth * self._num_workers)
        self._pool = LocalWorkers(
            loader.multiprocessing_context or torch.multiprocessing,
            ends_trainer=not self._any_worker,
        )
        self._gone.clear()
        self._workers = self._pool.processes
        self._client = _C.Client(
            worker_count=self._num_workers,
            prefetch_factor=self._prefetch_depth,
            prefetch_bytes=loader.prefetch_bytes or 0,
            shard_count=1 if self._any_worker else self._shard_count,
            slab_count=self._slab_count,
            in_order=bool(self._in_order),
            any_worker=self._any_worker,
            keep_workers=bool(self._persistent_workers),
            keep_indices=self._timeout > 0,
            pin_memory=bool(self._pin_memory and loader.device is None),
            device_index=cuda_index(loader.device),
        )
        self._stream = self._make_stream()
        retire_at_forks(self._client)
        self._native_thread = NativeThread()
        self._shutdown = False
        try:
            self._start_workers(loader)
            self._client.start()  # native threads start after the last fork
        except BaseException:
            self._shutdown_workers()
            raise
        for message in loader._prefixes.values():
            self._client.install_prefix(message)

    def _make_stream(self) -> _C.Stream:
        return _C.Stream(
            self._client,
            is_iterable=self._dataset_kind == DatasetKind.Iterable,
            asks_while_room=self._asks_while_room,
            may_begin_early=self._may_begin_early,
            is_seeded_by_batch=self._is_seeded_by_batch,
        )

    def _start_workers(self, loader: LoaderFace) -> None:
        spec = WorkerSpec(
            self._client.endpoint,
            self._slab_count,
            arena_bytes(),
            self._any_worker,
            self._pool.parent_pid,
            self._shard_count,
            self._is_seeded_by_batch,
            self._progress.starts,
            dict(enumerate(self._progress.states_before)),
            self._may_begin_early,
        )
        fetch = FetchSpec.of(self, loader.fetch_threads)
        seed = int(self._base_seed)
        self._pool.start(self._num_workers, seed, fetch, self._worker_init_fn, spec)

    def _reset(self, loader: LoaderFace, first_iter: bool = False) -> None:
        if not first_iter:
            before = self._progress
            self._progress = loader._begin_progress()
            self._progress.draws_seed = self._is_seeded_by_batch
            if before.is_finished and not self._is_elastic:
                self._progress.states_before = before.shard_states
        progress = self._progress
        BaseIterator._reset(self, cast(Any, loader), first_iter)
        self._note_sampler()
        if progress.point is not None:
            self._num_yielded = progress.point.yielded_count
        self._provenance = loader._provenance
        self._meter = None if self._is_elastic else loader._load_meter
        if self._is_seeded_by_batch:
            if not first_iter:  # as an iterator of its own would, so that streams are the same
                self._base_seed = draw_seed(loader.generator)
            self._seeds = EpochSeeds(int(self._base_seed), loader._next_epoch())
        else:
            epoch = 0 if first_iter else self._seeds.epoch + 1
            self._seeds = EpochSeeds(int(self._base_seed), epoch)
        self._epoch_seed = self._seeds.seed_of_draws()
        is_map = self._dataset_kind == DatasetKind.Map
        self._recipe = recognise_sampler(self._index_sampler) if is_map else None
        self._asked.clear()
        self._asked_first = progress.answered_count
        if is_map and self._recipe is None:
            self._resume_sampler()
        progress.begin(int(self._base_seed))
        self._base_generator = loader.generator
        self._begin_requests()

    def _begin_requests(self) -> None:
        """Has the workers go on with the epoch after what was answered already."""
        progress = self._progress
        self._ahead.clear()
        if self._meter is not None:
            pids = [worker.pid for worker in self._workers]
            self._meter.begin(self._num_workers, pids, self._prefetch_depth * self._num_workers)
        self._order = IndexOrder(self._recipe) if self._recipe is not None else None
        self._workers_status = [place not in self._gone for place in range(self._num_workers)]
        epoch = {**self._seeds._asdict(), "progress": progress.counts}
        if self._recipe is None:
            pull = partial(_pull, weakref.ref(self))
            self._stream.begin_with_indices(**epoch, pull=pull, dumps=dumps_index)
        else:
            generator = self._base_generator
            recipe = self._recipe._asdict()
            self._stream.begin_with_sampler(**epoch, base_generator=generator, **recipe)

    def _may_any_worker_make_any_batch(self, loader: LoaderFace) -> bool:
        """Whether nothing in the stream says which worker made a batch. Then the one is asked that
        will answer soonest, and what a worker owed that died is made by the others.
        """
        return (
            self._is_seeded_by_batch
            and self._dataset_kind == DatasetKind.Map
            and self._num_workers > 1
            and loader.worker_init_fn is None  # which is told who it is, and may fail in one alone
            and not is_stateful(loader.dataset)
            and plain_rows(loader.dataset, loader.collate_fn) is None  # no row is slow
        )

    def _can_begin_early(self, loader: LoaderFace) -> bool:
        """Whether nothing speaks against asking for the next epoch before it begins, as far as it
        can be seen here; its worker looks at the dataset.
        """
        return (
            self._persistent_workers
            and loader.overlap_epochs
            and bool(self._in_order)
            and not is_stateful(loader.dataset)
        )

    def _next_index(self) -> Any:
        index = super()._next_index()
        if self._dataset_kind == DatasetKind.Map and self._in_order:
            # The sampler may fill the same list again.
            self._asked.append(index.copy() if type(index) is list else index)
        return index

    def _unanswered(self) -> deque[Any]:
        """The indices that a sampler which is not torch's own gave for batches still to come."""
        while self._asked and self._asked_first < self._progress.answered_count:
            self._asked.popleft()
            self._asked_first += 1
        return self._asked

    def _next_data(self) -> Any:
        if self._meter is None:
            return self._deliver()
        called_at = time.monotonic()
        self._meter.note_call()
        value = self._deliver()
        self._meter.note(called_at, time.monotonic(), self._stream.load_counters())
        return value

    def _take_ahead(self, batch_count: int) -> None:
        called_at = time.monotonic()
        try:
            super()._take_ahead(batch_count)
        finally:
            if self._meter is not None:
                self._meter.note_waiting(time.monotonic() - called_at)

    def _deliver(self) -> Any:
        if self._ahead:
            taken = self._ahead.popleft()
            if type(taken) is tuple:
                self._stream.give_ahead()
        else:
            taken = self._take()
        if type(taken) is not tuple:
            self._end_or_raise(taken)
        value, extra, shard_id, state = taken
        if state is not None:
            self._progress.counts.set_shard_state(shard_id, state)
        self._unanswered()
        if self._drawing_threads and self._stream.counters()["unrepeatable_batches"]:
            self._draw_warning.give(self._drawing_threads)
            self._drawing_threads = 0  # it is said, and need not be looked for again
        if extra is True:
            value.reraise()
        if extra is False:
            raise value
        return value

    def _take(self, ahead_count: int = 0) -> Taken:
        """Waits for what comes next, and has the stream ask for a batch in its place.

        With ``ahead_count`` it is not given to the user yet, and waits in the stream beside others
        until there are so many; nothing is asked for in its place.
        """
        wait_s = self._timeout if self._timeout > 0 else _STATUS_CHECK_INTERVAL_S
        deadline = None
        if self._is_elastic:
            deadline = time.monotonic() + self._timeout
            wait_s = min(wait_s, _STATUS_CHECK_INTERVAL_S)
        while True:
            with_leaves = self._provenance is not None
            if ahead_count > 0:
                event = self._stream.look_ahead(ahead_count, wait_s, loads, with_leaves)
            else:
                event = self._stream.next(wait_s, loads, with_leaves)
            kind, value, extra, shard_id, state = event
            if kind == _BATCH:
                if type(extra) is not bool:
                    handle = None if extra is None else self._record_leaves(*extra)
                    if self._pin_memory:
                        value, extra = self._pin(value, extra)
                    elif handle is not None:
                        value = self._as_lazy(value, handle, extra[0])
                return value, extra, shard_id, state
            if kind == _END:
                return NoBatch.END
            if kind == _SHARD_ENDED:
                if extra:  # it was the worker's last
                    self._workers_status[value] = False
            elif kind == _NEWS:
                warnings.warn(value, PoolWarning, stacklevel=4)
            elif kind == _WORKER_GONE:
                sleep_if_python_exits()
                self._gone.add(value)
                self._workers_status[value] = False
                how = self._pool.how_it_ended(self._workers[value])
                warnings.warn(
                    f"DataLoader worker {value} (pid {self._workers[value].pid}) {how}; what it "
                    f"owed is made by the others, which are {sum(self._workers_status)} now",
                    PoolWarning,
                    stacklevel=4,
                )
            elif kind == _WORKER_LOST:
                sleep_if_python_exits()
                self._pool.raise_lost([self._workers[value]])
            else:
                self._check_workers()
                if self._timeout > 0 and (deadline is None or time.monotonic() >= deadline):
                    return NoBatch.LATE

    def _end_or_raise(self, taken: Taken) -> NoReturn:
        if isinstance(taken, Exception):
            raise taken
        if taken is NoBatch.LATE:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds{self._who_is_awaited()}"
            )
        self._progress.finish()
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    def _pin(self, batch: Any, extra: Any) -> tuple[Any, Any]:
        """The work of torch's thread on a batch whose plain tensors have been pinned natively;
        when that fails, what is to be raised in its place.
        """
        try:
            return pin_memory(batch, self._pin_memory_device), extra
        except Exception:
            where = f"in pin memory thread for device {self._pin_device_index}"
            return ExceptionWrapper(where=where), True

    def _record_leaves(
        self, leaves: list[torch.Tensor], boundary: dict[str, torch.Tensor], sequence: int
    ) -> BatchHandle:
        provenance = self._provenance
        assert provenance is not None
        handle = BatchHandle(
            len(leaves),
            boundary,
            self._progress.epoch,
            sequence,
            (self._epoch_seed, sequence),
        )
        provenance.record_batch(handle, leaves)
        return handle

    def _as_lazy(self, batch: Any, handle: BatchHandle, leaves: list[torch.Tensor]) -> Any:
        """The batch, of lazy tensors if an offloaded model has a use for them."""
        assert self._provenance is not None
        deferral = self._provenance.deferral
        return batch if deferral is None else deferral.delivered(batch, handle, leaves)

    def _who_is_awaited(self) -> str:
        awaited = self._client.awaited()
        if awaited is None:
            return ""
        worker_id, sequence, indices, is_pickled = awaited
        samples = ""
        if self._dataset_kind == DatasetKind.Map:
            samples = repr(pickle.loads(indices) if is_pickled else indices)
        return "\n" + spoken_debt(worker_id, self._workers[worker_id].pid, sequence, samples)

    def _check_workers(self) -> None:
        if self._shutdown:
            raise AssertionError(
                "Invalid iterator state: shutdown or no outstanding tasks when fetching next data"
            )
        dead = [
            worker
            for worker, is_active in zip(self._workers, self._workers_status, strict=True)
            if is_active and not worker.is_alive()
        ]
        # Where any worker may make any batch, the native side tells of those that are missed.
        if dead and (not self._any_worker or len(dead) == sum(self._workers_status)):
            self._pool.raise_lost(dead)

    @property
    def _pin_memory_thread(self) -> NativeThread:  # type: ignore[override]
        """Torch has a Python thread of that name, where memory is pinned."""
        if not self._pin_memory:
            raise AttributeError(f"{type(self).__name__} pins no memory")
        return self._native_thread

    def counters(self) -> dict[str, Any]:
        """The counters of this iterator; empty once the loader has taken them over."""
        return {} if self._shutdown else self._count()

    def _install_prefix(self, message: bytes) -> None:
        self._client.install_prefix(message)

    def _remove_prefixes(self) -> None:
        self._client.remove_prefixes()

    def _shutdown_workers(self) -> None:
        # Module globals are cleared while Python goes down.
        if exit_status is None or exit_status() is not False:
            return  # multiprocessing ends daemonic workers, and they see the trainer go
        if self._shutdown or os.getpid() != self._owner_pid:
            return  # a forked child inherits this object and none of the workers
        self._close_pool()

    def _close_pool(self) -> None:
        self._ahead.clear()
        self._past_counters.update(
            {name: count for name, count in self._count().items() if name not in STANDING_COUNTS}
        )
        self._shutdown = True
        try:
            self._end_client()
            self._native_thread.ended.set()
        finally:
            self._end_workers()

    def _end_client(self) -> None:
        self._client.stop()

    def _end_workers(self) -> None:
        self._pool.end()

    def __del__(self) -> None:
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:
            # The workers were ended at once. Python would print the interrupt and drop it here.
            if not sys.is_finalizing():
                self._interrupt = _C.interrupt_when_dropped()


def _pull(iterator: weakref.ref[LocalPoolIter]) -> Any:
    """The next indices of the user's sampler. The stream must not keep the iterator alive."""
    live = iterator()
    if live is None:
        raise StopIteration
    return live._next_index()
