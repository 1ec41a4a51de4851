# SPDX-License-Identifier: Apache-2.0
"""Iterator behind ``iter(loader)``: torch's class with penstock's transport.

Python in the trainer does only the work that needs Python: pull the user's sampler and raise a
worker's exceptions. The native stream defines the epoch and decides when to request which batch.
The source owns the workers, see `source.py`.
"""

from __future__ import annotations

import operator
import os
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import DataLoader

from penstock import _C
from penstock.compat.iterators import (
    BaseIterator,
    DatasetKind,
    MultiProcessingIterator,
    exit_status,
)
from penstock.compat.storages import open_shared
from penstock.errors import UnsupportedError
from penstock.loader.delivery import Delivery, PinDevice
from penstock.loader.device import names_device, staged_device
from penstock.loader.loader_run import LoaderRun, run_of
from penstock.loader.loader_state import states_at_end
from penstock.loader.local_source import LocalSource
from penstock.loader.lookahead import OMITTED, LooksAhead, NoBatch, Taken
from penstock.loader.options import LoaderOptions
from penstock.loader.rank_agreement import steps_of_job
from penstock.loader.skipped_samples import note_reason
from penstock.loader.source import GAUGES, NativeThread, Source, StreamOptions
from penstock.loader.step_times import WorkTimes
from penstock.loader.watched_steps import are_watched, watched
from penstock.program_line import warn
from penstock.ranks.sharding import RankStart
from penstock.ranks.steps import CommonSteps, Ready
from penstock.stream.batch_seeds import EpochSeeds, draw_seed
from penstock.stream.counted_pulls import CountedPulls
from penstock.stream.indices import AskedIndices, IndexOrder, is_untouched, recognise_sampler
from penstock.stream.progress import Progress
from penstock.worker.batch_pickle import dumps_index
from penstock.worker.fetching import FetchSpec
from penstock.worker.partial_batch import SkipReport
from penstock.worker.request_feed import IndicesAfterOthers, IndicesAtPlace

if TYPE_CHECKING:
    from penstock.tuning.load_meter import LoadMeter

_BATCH = int(_C.Client.Event.BATCH)
_END = int(_C.Client.Event.END)
_NEWS = int(_C.Client.Event.NEWS)
_NOTHING = int(_C.Client.Event.NOTHING)

_READY_MAX = 16  # ready batches that a rank counts for the steps of all ranks

_STATUS_CHECK_INTERVAL_S = (
    1.0  # interval of a waiting trainer's checks for workers that died before they connected
)


class LocalPoolIter(LooksAhead, CountedPulls, MultiProcessingIterator):
    """Batches from workers that this process starts, in torch's order."""

    source: Source
    _workers: list[Any]  # torch's name for the processes
    _shutdown = True  # until it has resources to shut down
    _is_elastic = False  # whether the number of workers may change at any time
    makes_batches = False  # in the trainer itself
    _workers_are_used = False  # they have made an epoch's batches
    _is_all_here = False  # whether no batch follows _ahead, if ranks agree on steps
    _has_other_shards = False  # than the workers, each of which has the shards of its start

    def __init__(self, loader: DataLoader[Any]) -> None:
        options, run = LoaderOptions.of(loader), run_of(loader)
        self._progress = run.begin_progress(options)
        BaseIterator.__init__(self, loader)
        if self._progress.point is not None:
            self._base_seed = self._progress.point.base_seed
        self._undo_seed(options)
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        self._owner_pid = os.getpid()
        self._prefetch_factor = options.prefetch_factor
        self._in_order = options.in_order
        # Each shard of an iterable dataset keeps its order.
        self._may_reorder = not options.in_order and self._dataset_kind == DatasetKind.Map
        self._settle_num_workers(options)
        if self._prefetch_factor is None or self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        operator.index(self._prefetch_factor)  # torch counts with it, too
        self._meter: LoadMeter | None = None
        self._prefetch_depth = options.prefetch_depth
        self.own_options = options.kept
        self._draw_warning = run.draw_warning
        self._pickle_watch = run.pickle_watch
        self._drawing_threads = options.drawing_threads
        self._is_seeded_by_batch = options.is_seeded_by_batch
        self._shard_count = options.shard_count
        self._pin_device = (
            PinDevice(self._pin_memory_device, torch.accelerator.current_device_index())
            if self._pin_memory and not names_device(options.device)  # which would pin in vain
            else None
        )
        self._device = staged_device(options.device)
        self._asks_while_room = self._is_elastic or options.prefetch_bytes is not None
        self._past_counters = run.past_counters
        self._work_times = run.work_times
        self.watched_loader = weakref.ref(loader)
        self.iter_s: float | None = None
        self.ranks_window: tuple[float, float] | None = None
        self._ahead = deque()
        self._open_source(options, run)
        run.live_iterators.add(self)
        self._reset(loader, first_iter=True)

    def _settle_num_workers(self, options: LoaderOptions) -> None:
        if self._num_workers <= 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )

    def _open_source(self, options: LoaderOptions, run: LoaderRun) -> None:
        """Start ``self._num_workers`` workers, and the native part in the trainer."""
        of_stream = StreamOptions(
            is_iterable=self._dataset_kind == DatasetKind.Iterable,
            is_seeded_by_batch=self._is_seeded_by_batch,
            overtaking_max=options.overtaking_max,
            shard_count=self._shard_count,
            prefetch_depth=self._prefetch_depth,
            asks_while_room=self._asks_while_room,
            may_begin_early=not self._is_elastic and options.may_begin_early,
            has_timeout=self._timeout > 0,
            pins_memory=bool(self._pin_memory),
        )
        fetch = FetchSpec.of(
            self, options.fetch_threads, options.shards_of_rank, options.skip_limit
        )
        self.source = self._make_source(options, run, of_stream, fetch)
        self._stream = self.source.stream
        self.watched_by: object = ()
        self._workers = self.source.processes
        self._shutdown = False

    def _make_source(
        self, options: LoaderOptions, run: LoaderRun, of_stream: StreamOptions, fetch: FetchSpec
    ) -> Source:
        seed, count = int(self._base_seed), self._num_workers
        return LocalSource(options, run, of_stream, fetch, self._progress, count, seed)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        options, run = LoaderOptions.of(loader), run_of(loader)
        if not first_iter:
            before = self._progress
            self._progress = run.begin_progress(options)
            self._progress.draws_seed = self._is_seeded_by_batch
            if self._workers_are_used and not self._is_elastic:
                self._note_states_before(options, before)
        progress = self._progress
        BaseIterator._reset(self, loader, first_iter)
        if (begun := run.begun_order) is not None:
            self._sampler_iter, run.begun_order = begun, None
        self._note_sampler()
        if progress.point is not None:
            self._num_yielded = progress.point.yielded_count
        self._meter = run.load_meter
        if self._is_seeded_by_batch:
            if not first_iter:  # as a new iterator would, so that streams are the same
                self._base_seed = draw_seed(options.generator)
                if progress.point is not None:
                    self._base_seed = progress.point.base_seed
            self._seeds = EpochSeeds(
                int(self._base_seed), run.next_epoch(), options.is_seeded_by_sample
            )
        else:
            epoch = 0 if first_iter else self._seeds.epoch + 1
            self._seeds = EpochSeeds(int(self._base_seed), epoch)
        if self._has_other_shards:
            self._has_other_shards = False
            self._shard_count = options.shard_count
            self._close_source()  # first: workers must be forked while no native thread runs
            self._open_source(options, run)
        self._workers_are_used = True
        self.begin_delivery(run)
        if self._may_reorder:
            progress.deliver_in_any_order()
        is_map = self._dataset_kind == DatasetKind.Map
        # The native side skips the first batches of an order, and no others.
        is_native = is_map and not progress.left.missing and not progress.repeated_places()
        is_native = is_native and is_untouched(self._sampler_iter, self._index_sampler)
        self._recipe = recognise_sampler(self._index_sampler) if is_native else None
        if self._recipe is not None:
            # Workers seed their own, and torch's samplers draw from torch's alone.
            progress.unused_globals = ("random", "numpy")
            if self._recipe.generator is not None and options.generator is not None:
                progress.unused_globals = ("random", "numpy", "torch")
            self._sampler_iter = _DRAWN_NATIVELY
            if self._recipe.share is not None:  # the native side pulls this epoch
                self._index_sampler.begin_at(RankStart())
        self._asked = AskedIndices(progress.answered_count)
        if is_map and self._recipe is None:
            self._resume_sampler()
        progress.begin(int(self._base_seed))
        self._base_generator = options.generator
        self._steps = steps_of_job(options, run)
        self._begin_requests()

    def continue_resharded(self, loader: DataLoader[Any]) -> None:
        """Continue where the loader's run resumes, with its present numbers of ranks. Batches that
        were requested and not delivered are dropped. The workers stay, except for those of an
        iterable dataset."""
        self._has_other_shards = self._dataset_kind == DatasetKind.Iterable
        self._workers_are_used = self._workers_are_used and not self._has_other_shards
        self._reset(loader)
        self.own_options = LoaderOptions.of(loader).kept

    def _note_states_before(self, options: LoaderOptions, before: Progress) -> None:
        """Record the states before the epoch: the workers stay, with their datasets as the last
        epoch left them."""
        if before.is_finished and before.state_interval is not None:
            self._progress.states_before = states_at_end(options, before, self)
        else:
            self._progress.begins_in_unknown_state = True

    def begin_steps(self, loading_s: float) -> None:
        """Start the steps when the program has this iterator, which took ``loading_s`` to make."""
        self.iter_s = loading_s
        self._past_counters["step_loader_s"] += loading_s  # type: ignore[assignment]
        self._stream.begin_steps()

    def begin_delivery(self, run: LoaderRun) -> None:
        """Call before the first batch of an epoch is delivered."""
        self._delivery = Delivery(
            self._pin_device,
            run.provenance,
            self._progress.number,
            self._seeds.seed_of_draws(),
            self.source.recaller,
            self._may_reorder,
            self._device,
            run.replicas is not None and run.replicas.has_leaves_by_rank,
        )

    def _begin_requests(self) -> None:
        """Have the workers continue the epoch after the answers received so far."""
        progress = self._progress
        self._ahead.clear()
        if self._meter is not None:
            pids = [worker.pid for worker in self._workers]
            workers = max(1, self._stream.worker_count)
            self._meter.begin(workers, pids, self._prefetch_depth * workers)
            table = self._delivery.provenance
            can_withhold = table is not None and table.withholding is not None
            self._meter.sends_whole = self.source.recaller is None or not can_withhold
            self._meter.are_remote = self._is_elastic
        self._order = IndexOrder(self._recipe) if self._recipe is not None else None
        if progress.commits is not None and self._order is not None:
            progress.commits.pull_again = self._order.whole_batch
        if progress.visits is not None and self._order is not None:
            progress.visits.draw_from(self._order)
        self._request_number = progress.answered_count  # of the next pull by Python
        self.source.begin_epoch(progress)
        epoch = {**self._seeds._asdict(), "progress": progress.counts}
        if self._recipe is None:
            pull = partial(_pull, weakref.ref(self))
            self._stream.begin_with_indices(**epoch, pull=pull, dumps=dumps_index)
        else:
            generator = self._base_generator
            recipe = self._recipe._asdict()
            self._stream.begin_with_sampler(**epoch, base_generator=generator, **recipe)

    def _next_index(self) -> Any:
        index = super()._next_index()
        if self._dataset_kind == DatasetKind.Map and self._in_order:
            self._asked.add(index)
        return index

    def _wrap_indices(self, index: Any) -> Any:
        """Return the content of the next request, for ``index``."""
        number = self._request_number
        self._request_number += 1
        place = self._progress.place_of(number)
        if self._progress.commits is not None:
            self._progress.commits.note_pull(place, *self._whole_pull(index))
        if self._progress.visits is not None and self._dataset_kind == DatasetKind.Map:
            self._progress.visits.note_pull(place, index)
        if self._is_seeded_by_batch and place != number:
            index = IndicesAtPlace(index, place)
        others = self._repeats.pop(number % self._shard_count, ()) if self._repeats else ()
        return IndicesAfterOthers(index, tuple(others)) if others else index

    def _unanswered(self) -> deque[Any]:
        return self._asked.after(self._progress.answered_count)

    def _next_data(self) -> Any:
        return watched(self, self._take_step) if are_watched() else self._take_step()

    def _take_step(self) -> Any:
        stream = self._stream
        stream.enter_step()
        try:
            return self._next_batch()
        finally:
            stream.leave_step()

    def _next_batch(self) -> Any:
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
        if self._recipe is not None and self._sampler_iter is not _DRAWN_NATIVELY:
            _DRAWN_NATIVELY.refuse()
        if self._steps is not None and not self._wait_for_ranks(self._steps):
            self._end_with_others()
        commits, visits = self._progress.commits, self._progress.visits
        while True:
            if self._ahead:
                taken = self._ahead.popleft()
                if type(taken) is tuple:
                    self._stream.give_ahead()
            else:
                taken = self._take()
            if type(taken) is not tuple:
                self._end_or_raise(taken)
            value, extra, shard_id, state = taken
            report = None
            if type(state) is SkipReport:
                report, state = state, self._state_of(state, shard_id)
            if state is not None:
                self._progress.counts.set_shard_state(shard_id, state)
            self._unanswered()
            if self._drawing_threads and self._stream.counters()["unrepeatable_batches"]:
                self._draw_warning.give(self._drawing_threads)
                self._drawing_threads = 0  # warned, no further check needed
            if extra is True:
                value.reraise()
            if extra is False:
                raise value
            if self._progress.skips is not None:
                self._note_skips(report, extra)
            number = self._progress.answered_count - 1
            if extra is OMITTED:
                if commits is not None and report is not None:
                    commits.omit(self._progress.place_of(report.number))
                if visits is not None and report is not None:
                    visits.omit(self._progress.place_of(report.number))
                continue
            if self._may_reorder:
                number = extra[2]
                self._progress.note_delivery(number)
            if commits is not None:
                commits.deliver(self._progress.place_of(number), value)
            if visits is not None:
                visits.deliver(self._progress.place_of(number), value)
            return value

    def _note_skips(self, report: SkipReport | None, extra: Any) -> None:
        """Record the samples that a batch lacks, or raise the exception of the first one."""
        progress = self._progress
        progress.skips.begin()
        if report is None or not report.samples:
            return
        reason = progress.skips.reason_to_raise(report)
        if reason:
            if extra is not OMITTED:
                progress.counts.note_error()
            error = self._error_of(report)
            note_reason(error, reason)
            raise error
        number = progress.answered_count - 1
        if self._may_reorder:
            number = report.number if extra is OMITTED else extra[2]
            if extra is OMITTED:
                progress.note_delivery(number)
        progress.skips.note(report, progress.place_of(number))
        if progress.visits is not None:
            progress.visits.note_failed(progress.place_of(number), report.samples)

    def _read_report(self, state: bytes) -> SkipReport:
        """Return the report that a worker has sent with a batch."""
        report: SkipReport = pickle.loads(state)  # a child of this process wrote it
        return report

    def _state_of(self, report: SkipReport, shard_id: int) -> bytes | None:
        """Return the dataset's state that a worker has sent with a report."""
        return report.state

    def _error_of(self, report: SkipReport) -> Exception:
        """Return the exception of the first sample of a report, as torch raises it."""
        try:
            pickle.loads(report.error).reraise()
        except Exception as error:
            return error.with_traceback(None)
        raise AssertionError("reraise() returned")

    def _wait_for_ranks(self, steps: CommonSteps) -> bool:
        self._stream.begin_ranks()
        began_at = time.monotonic()
        try:
            return steps.take_step(self._poll_ready)
        finally:
            self.ranks_window = (began_at, time.monotonic())
            self._stream.end_ranks()

    def _poll_ready(self, wait_s: float, waited_s: float) -> Ready:
        """Return the batches that are ready, for the steps that all ranks take."""
        count = self._prefetch_depth * max(1, self._num_workers)
        ready = self._ready_ahead(max(2, min(count, _READY_MAX)), wait_s)
        if ready.batch_count == 0 and not ready.is_all and 0 < self._timeout < waited_s:
            self._end_or_raise(NoBatch.LATE)
        self._is_all_here = ready.is_all
        return ready

    def _end_with_others(self) -> NoReturn:
        """End an epoch that ends for all ranks, even if more batches are ready here."""
        if self._is_all_here and not self._ahead and not self._progress.is_finished:
            self._take()  # the end of this rank's shards, with their last states
        self._ahead.clear()
        self._stream.drop_rest()  # a worker may wait for the memory of unused batches
        self._end_or_raise(NoBatch.END)

    def _take(self, ahead_count: int = 0, within_s: float | None = None) -> Taken:
        """Wait for the next event, and have the stream request a batch to replace it.

        With ``ahead_count`` the batch is not delivered to the user yet, and waits in the stream
        until that many wait; no replacement is requested. With ``within_s`` return LATE after this
        time.
        """
        wait_s = self._timeout if self._timeout > 0 else _STATUS_CHECK_INTERVAL_S
        deadline = None
        if self._is_elastic:
            deadline = time.monotonic() + self._timeout
            wait_s = min(wait_s, _STATUS_CHECK_INTERVAL_S)
        if within_s is not None:
            wait_s = within_s
        while True:
            stand_in, loads = self._delivery.stand_in, self._loads
            if ahead_count > 0:
                event = self._stream.look_ahead(ahead_count, wait_s, loads, open_shared, stand_in)
            else:
                event = self._stream.next(wait_s, loads, open_shared, stand_in)
            kind, value, extra, shard_id, state = event
            if kind == _BATCH:
                if type(extra) is not bool:
                    value, extra = self._delivery.take(value, extra)
                if state is not None and self._progress.skips is not None:
                    report = self._read_report(state)
                    return value, OMITTED if report.is_omitted else extra, shard_id, report
                return value, extra, shard_id, state
            if kind == _END:
                self.source.end_epoch()
                return NoBatch.END
            if kind == _NEWS:
                warn(
                    value,
                )
            elif kind != _NOTHING:
                self.source.note(kind, value, extra)
            else:
                if self._shutdown:
                    raise AssertionError(
                        "Invalid iterator state: shutdown or no outstanding tasks when fetching "
                        "next data"
                    )
                if wait_s > 0:
                    self.source.check()
                if within_s is not None:
                    return NoBatch.LATE
                if self._timeout > 0 and (deadline is None or time.monotonic() >= deadline):
                    return NoBatch.LATE

    @property
    def _loads(self) -> Callable[[bytes, list[torch.Tensor]], Any] | None:
        """Unpickles a batch. None if the workers are not trusted: they send no pickles, and only
        objects of classes that this process has registered."""
        return self._pickle_watch.loads

    def _end_or_raise(self, taken: Taken) -> NoReturn:
        if isinstance(taken, Exception):
            raise taken
        if taken is NoBatch.LATE:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds{self.source.timeout_details()}"
            )
        self._progress.finish()
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    @property
    def _pin_memory_thread(self) -> NativeThread:  # type: ignore[override]
        """Return the stand-in for torch's Python thread of this name, if memory is pinned."""
        if not self._pin_memory:
            raise AttributeError(f"{type(self).__name__} does not pin memory")
        return self.source.native_thread

    def counters(self) -> dict[str, Any]:
        """Return the counters of this iterator; empty once the loader has taken them over."""
        return {} if self._shutdown else self.source.counters()

    def record_steps(self, count_max: int) -> None:
        """Record when each of the next ``count_max`` batches reached each stage, for
        `step_records`."""
        self._stream.record_steps(count_max)

    def step_records(self) -> list[dict[str, Any]]:
        """Return the records of the batches since the last call."""
        return [] if self._shutdown else self._stream.step_records()

    def add_work(self, work: WorkTimes) -> None:
        """Add the times of workers and samples, until the loader has taken them over."""
        if not self._shutdown:
            work.add(self._stream.workers(), self._stream.slow_samples())

    def _shutdown_workers(self) -> None:
        # Module globals are cleared during interpreter shutdown.
        if exit_status is None or exit_status() is not False:
            return  # multiprocessing ends daemonic workers, and they notice the trainer's exit
        if self._shutdown or os.getpid() != self._owner_pid:
            return  # a forked child inherits this object and none of the workers
        self._close_source()

    def _close_source(self) -> None:
        self._ahead.clear()
        self._shutdown = True
        try:
            self.source.close()
        finally:
            self._stream.leave_step()  # a call in progress is over for this stream
            self._past_counters.update(
                {
                    name: count
                    for name, count in self.source.counters().items()
                    if name not in GAUGES
                }
            )
            self._work_times.add(self._stream.workers(), self._stream.slow_samples())

    def __del__(self) -> None:
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:
            # The workers were ended immediately. Python would print the interrupt and drop it here.
            if not sys.is_finalizing():
                self._interrupt = _C.interrupt_when_dropped()


class _DrawnNatively:
    """Takes the place of torch's ``_sampler_iter`` if the native side draws the order."""

    def __iter__(self) -> _DrawnNatively:
        return self

    def __next__(self) -> NoReturn:
        self.refuse()

    @staticmethod
    def refuse() -> NoReturn:
        raise UnsupportedError(
            "_sampler_iter must be advanced or replaced before the first batch is requested, not "
            "after iter(); do so in _BaseDataLoaderIter.__init__ or _reset, or give the DataLoader "
            "a custom batch_sampler"
        )


_DRAWN_NATIVELY = _DrawnNatively()


def _pull(iterator: weakref.ref[LocalPoolIter]) -> tuple[Any, int]:
    """Return the next indices of the user's sampler, and the place of the first in the epoch's
    order.

    The stream must not keep the iterator alive.
    """
    live = iterator()
    if live is None:
        raise StopIteration
    index = live._next_index()
    return live._wrap_indices(index), live._place_of_pulled()
