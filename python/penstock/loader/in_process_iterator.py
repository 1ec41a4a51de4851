# SPDX-License-Identifier: Apache-2.0
"""Iterator of ``num_workers=0``: torch's iterator with penstock's options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from penstock.compat.iterators import BaseIterator, DatasetKind, SingleProcessIterator
from penstock.errors import UnsupportedError, add_note
from penstock.loader.device import move_batch, names_device
from penstock.loader.loader_run import LoaderRun, run_of
from penstock.loader.lookahead import check_arguments, indices_from
from penstock.loader.options import LoaderOptions
from penstock.loader.rank_agreement import steps_of_job
from penstock.loader.skipped_samples import note_reason
from penstock.loader.step_times import InProcessLedger
from penstock.loader.watched_steps import are_watched, watched
from penstock.ranks.sharding import RankShards
from penstock.ranks.steps import CommonSteps, Ready
from penstock.stream.batch_seeds import EpochSeeds, generator_states, have_moved
from penstock.stream.counted_pulls import CountedPulls
from penstock.stream.indices import IndexOrder, IndexRecipe, is_untouched, recognise_sampler
from penstock.stream.shard_state import (
    ShardStart,
    continue_iteration,
    is_stateful,
    load_dataset_state,
    shard_state,
)
from penstock.worker.automatic_threads import make_pool
from penstock.worker.fetching import FetchSpec, InProcessFetcher
from penstock.worker.map_fetchers import format_sample, timed_collate
from penstock.worker.partial_batch import (
    PartialBatch,
    SkipReport,
    described,
    without_errors,
)


class SingleProcessIter(CountedPulls, SingleProcessIterator):
    """Torch's in-process iterator, with penstock's options, and a count of its batches."""

    makes_batches = True  # in the trainer itself

    def __init__(self, loader: DataLoader[Any]) -> None:
        options, run = LoaderOptions.of(loader), run_of(loader)
        progress = self._progress = run.begin_progress(options)
        self._ledger = InProcessLedger(run.past_counters, run.work_times)
        self._asked_for: Any = None  # indices of the batch made last
        self._counters: dict[str, Any] = run.past_counters
        self.watched_loader = weakref.ref(loader)
        self.iter_s: float | None = None
        self.watched_by: object = ()
        self.ranks_window: tuple[float, float] | None = None
        point = progress.point
        self._is_seeded_by_batch = options.is_seeded_by_batch
        self._draw_warning = run.draw_warning
        self._drawing_threads = options.drawing_threads
        start = progress.starts.get(0)
        has_state = start is not None and start.state is not None
        if options.is_seeded_by_batch:
            BaseIterator.__init__(self, loader)
            if self._timeout != 0:
                raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
            if point is not None:
                self._base_seed = point.base_seed
            seeds = EpochSeeds(int(self._base_seed), run.next_epoch(), options.is_seeded_by_sample)
            spec = self._timed_spec(options, options.shards_of_rank)
            place_of_pulled = functools.partial(_place_of_pulled, weakref.ref(self))
            self._dataset_fetcher = InProcessFetcher(
                spec,
                options.shard_count,
                seeds,
                progress,
                place_of_pulled,
                run.resumed_datasets,
            )
        else:
            # A dataset that receives its state is iterated afterwards, in _finish_resuming().
            make = BaseIterator if has_state else SingleProcessIterator
            make.__init__(self, loader)
            if point is not None:
                self._base_seed = point.base_seed
            if not has_state:
                self._time_fetches(options)
                self._watch_first_fetch(run)
        if has_state:
            progress.finish_resuming = functools.partial(self._finish_resuming, options, run)
        self._profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self._device = torch.device(options.device) if names_device(options.device) else None
        self._undo_seed(options)
        self._note_sampler()
        self._is_order_own = is_untouched(self._sampler_iter, self._index_sampler)
        if point is not None:
            self._num_yielded = point.yielded_count
        self._steps = steps_of_job(options, run)
        # By the batch of the next step, or by steps that are not committed.
        of_ranks = options.shard_by_rank and progress.commits is not None
        progress.sampler.is_ahead = self._steps is not None or of_ranks
        self._outcome: _Outcome | None = None  # made, and delivered when all ranks take its step
        self._is_order_drawn = False
        self._is_order_of_globals = (
            False  # drawn from the global generators, before the first batch
        )
        self._order: IndexOrder | None = None
        if self._dataset_kind == DatasetKind.Map:
            if progress.is_replayed:
                self._note_order()  # the next lines draw it
            self._resume_sampler()
            if progress.answered_count == 0 and progress.is_replayed:
                before = generator_states()
                self._pull_ahead()
                self._is_order_of_globals = have_moved(before)
        elif not self._is_seeded_by_batch and start is not None and not has_state:
            self._continue_iteration(options, start)
        if progress.finish_resuming is None:
            progress.shard_states_now = self._states_reader()
        progress.begin(int(self._base_seed))

    def begin_steps(self, loading_s: float) -> None:
        """Start the steps when the program has this iterator, which took ``loading_s`` to make."""
        self.iter_s = loading_s
        self._ledger.begin(loading_s)

    def continue_resharded(self, loader: DataLoader[Any]) -> None:
        """Continue where the loader's run resumes, with its present numbers of ranks."""
        SingleProcessIter.__init__(self, loader)

    def release(self) -> None:
        """Ends the threads that fetch, and lets go of the dataset's iterator: its loader is closed,
        and no batch follows."""
        self._outcome = None
        self._progress.finish_resuming = None
        self._progress.end_iterator(has_state=False)
        self._dataset_fetcher = None

    def __del__(self) -> None:
        # Module globals are cleared during interpreter shutdown.
        if sys is None or sys.is_finalizing():
            return
        # The loader's notes on this epoch must not keep the iterator of a dataset alive, unless the
        # iterator holds a state that may still be requested.
        if hasattr(self, "_progress"):
            self._progress.end_iterator(self._has_state())

    def _has_state(self) -> bool:
        fetcher = getattr(self, "_dataset_fetcher", None)
        if isinstance(fetcher, InProcessFetcher):
            return fetcher.has_state()
        return is_stateful(self._dataset) or is_stateful(getattr(fetcher, "dataset_iter", None))

    def _make_fetcher(self, options: LoaderOptions) -> Any:
        pool = make_pool(options.fetch_threads)
        return self._timed_spec(options).make_fetcher(self._dataset, pool)

    def _timed_spec(self, options: LoaderOptions, shards: RankShards | None = None) -> FetchSpec:
        spec = FetchSpec.of(self, options.fetch_threads, shards, options.skip_limit)
        return dataclasses.replace(spec, clock=self._ledger.clock)

    def _time_fetches(self, options: LoaderOptions) -> None:
        if self._dataset_kind == DatasetKind.Map:
            self._dataset_fetcher = self._make_fetcher(options)
        else:  # it has started to iterate the dataset
            fetcher = self._dataset_fetcher
            fetcher.collate_fn = timed_collate(self._ledger.clock, fetcher.collate_fn)

    def _watch_first_fetch(self, run: LoaderRun) -> None:
        """Make a pass start at the first batch, if the dataset was resumed before."""
        resumed = run.resumed_datasets.get(0)
        if resumed is None or self._dataset_kind != DatasetKind.Iterable:
            return
        fetcher = self._dataset_fetcher

        def fetch_first(indices: Any) -> Any:
            del fetcher.fetch  # later fetches are unwrapped
            return resumed.fetch_first(lambda: fetcher.fetch(indices), restart)

        def restart() -> None:
            fetcher.dataset_iter = iter(self._dataset)
            fetcher.ended = False

        fetcher.fetch = fetch_first

    def _continue_iteration(self, options: LoaderOptions, start: ShardStart) -> None:
        indices = [None] * options.batch_size if options.batch_size is not None else None
        continue_iteration(self._dataset_fetcher, start, indices, lambda place: None)

    def _finish_resuming(self, options: LoaderOptions, run: LoaderRun) -> None:
        """Give the dataset its state.

        Call last, since the state may be the state of the global generators, from which the
        following samples are drawn.
        """
        start = self._progress.starts[0]
        before = generator_states()
        if self._is_seeded_by_batch:
            if self._dataset_kind == DatasetKind.Map:
                load_dataset_state(self._dataset, start)
        else:
            resumed = load_dataset_state(self._dataset, start)
            if resumed is not None:
                run.resumed_datasets[0] = resumed
            self._dataset_fetcher = self._make_fetcher(options)
            if self._dataset_kind == DatasetKind.Iterable:
                self._continue_iteration(options, start)
            self._watch_first_fetch(run)
        for indices, number, first_place in self._repeats.pop(0, ()):
            with contextlib.suppress(Exception):  # it was raised before the state was taken
                self._recreate_batch(indices, number, first_place)
        self._progress.shard_states_now = self._states_reader()
        if self._is_order_of_globals and have_moved(before):
            # When the state was taken, the order had not been drawn yet from these generators.
            self._sampler_iter = iter(self._index_sampler)
            self._note_order()
            self._pull_ahead()

    def _recreate_batch(self, indices: Any, number: int, first_place: int) -> None:
        fetcher = self._dataset_fetcher
        if isinstance(fetcher, InProcessFetcher):
            fetcher.recreate_batch(indices, number, first_place)
        else:
            without_errors(fetcher.fetch(indices))

    def _states_reader(self) -> Callable[[], list[Any]]:
        """Return a reader of the shards' states. It does not hold this iterator, whose threads end
        with it."""
        fetcher = self._dataset_fetcher
        if isinstance(fetcher, InProcessFetcher):
            return fetcher.states_reader()
        of_map = self._dataset_kind == DatasetKind.Map
        return functools.partial(_only_shard, None if of_map else fetcher, self._dataset)

    def lookahead(self, batch_count: int, select: Callable[[Any], Any] | None = None) -> list[Any]:
        """Look ahead in this iterator's stream, as :meth:`penstock.DataLoader.lookahead`."""
        check_arguments(batch_count, select)
        call = f"lookahead({batch_count})"
        if select is not None:
            raise UnsupportedError(
                f"{call} cannot return values with num_workers=0: a batch is made when next() is "
                f"called, and if it were made earlier, its random numbers would be drawn before "
                f"the trainer's; use num_workers=1 or more"
            )
        if self._dataset_kind != DatasetKind.Map:
            raise UnsupportedError(
                f"{call} cannot return the indices of an IterableDataset, which has none; use "
                f"num_workers=1 or more, and pass select=, which receives the batches"
            )
        if self._progress.is_finished:
            return []
        recipe = self._recipe()
        if recipe is None:
            raise UnsupportedError(
                f"{call} with num_workers=0 requires batches of torch's RandomSampler or "
                f"SequentialSampler, since another sampler must not be read before next() is "
                f"called; use num_workers=1 or more"
            )
        if recipe.shuffle and not self._is_order_drawn:
            raise ValueError(
                f"{call} with num_workers=0 requires that the order of the epoch has been drawn, "
                f"which its first next() does; call it after next(), or use num_workers=1 or more"
            )
        order = self._order or IndexOrder(recipe)
        left_out = [index for index, _ in itertools.islice(self._left_out, batch_count)]
        place = self._progress.pulled_count + len(self._left_out)
        return left_out + indices_from(order, place, batch_count - len(left_out))

    def _recipe(self) -> IndexRecipe | None:
        return recognise_sampler(self._index_sampler) if self._is_order_own else None

    def _note_order(self) -> None:
        """Call before the sampler is pulled for the first time, which draws the order."""
        recipe = self._recipe()
        self._order = None if recipe is None else IndexOrder(recipe)
        self._is_order_drawn = True

    def _next_index(self) -> Any:
        if not self._is_order_drawn and self._dataset_kind == DatasetKind.Map:
            self._note_order()
        self._asked_for = super()._next_index()
        commits = self._progress.commits
        if commits is not None:
            commits.note_pull(self._pulled_batch(), *self._whole_pull(self._asked_for))
        if self._progress.visits is not None and self._dataset_kind == DatasetKind.Map:
            self._progress.visits.note_pull(self._pulled_batch(), self._asked_for)
        return self._asked_for

    def _pulled_batch(self) -> int:
        """Return the place in the epoch of the batch that was pulled last."""
        return self._progress.place_of(self._progress.pulled_count - 1)

    def _make_batch(self) -> Any:
        self._ledger.begin_batch()
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        finally:
            self._ledger.end_batch(self._progress.answered_count, self._asked_for)

    def _poll_ready(self, wait_s: float, waited_s: float) -> Ready:
        """Make the batch of the next step, for the steps that all ranks take. It may remain unused:
        until it is delivered, the states are the ones before it."""
        if self._outcome is None:
            if self._progress.state_interval is not None:
                states = self._progress.shard_states
                self._progress.shard_states_now = lambda: states
            self._outcome = _Outcome.of(self._make_batch)
        is_all = isinstance(self._outcome.error, StopIteration)
        return Ready(int(not is_all), is_all, raises=self._outcome.error is not None and not is_all)

    def _make_common(self, steps: CommonSteps) -> Any:
        """Make a batch when all ranks take its step."""
        began_at, placed_s = time.perf_counter(), self._ledger.placed_s
        try:
            if not steps.take_step(self._poll_ready):
                raise StopIteration
        finally:
            made_s = self._ledger.placed_s - placed_s
            ended_at = time.perf_counter()
            self._ledger.note("ranks_s", ended_at - began_at - made_s)
            self.ranks_window = (began_at, ended_at)
        held, self._outcome = self._outcome, None
        self._progress.shard_states_now = self._states_reader()
        assert held is not None
        return held.give()

    def _next_data(self) -> Any:
        return watched(self, self._take_step) if are_watched() else self._take_step()

    def _take_step(self) -> Any:
        self._ledger.enter()
        has_batch = False
        try:
            batch = self._next_batch()
            has_batch = True
            return batch
        finally:
            self._ledger.leave(has_batch)

    def _next_batch(self) -> Any:
        commits, visits = self._progress.commits, self._progress.visits
        batch, is_omitted = self._next_made()
        while is_omitted:
            if commits is not None:
                commits.omit(self._pulled_batch())
            if visits is not None:
                visits.omit(self._pulled_batch())
            batch, is_omitted = self._next_made()
        if self._drawing_threads and self._dataset_fetcher.threads_drew:
            self._draw_warning.give(self._drawing_threads)
        if self._device is not None:
            began_at = time.perf_counter()
            batch = move_batch(batch, self._device)
            self._ledger.note("device_s", time.perf_counter() - began_at)
        if commits is not None:
            commits.deliver(self._pulled_batch(), batch)
        if visits is not None:
            visits.deliver(self._pulled_batch(), batch)
        return batch

    def _next_made(self) -> tuple[Any, bool]:
        """Make the next batch. Return it, and whether none of its samples could be fetched."""
        batch: Any = None
        is_omitted = False
        try:
            steps = self._steps
            batch = self._make_batch() if steps is None else self._make_common(steps)
            if self._progress.skips is not None:
                batch, is_omitted = self._without_failed(batch)
        except StopIteration:
            self._progress.finish()
            raise
        except Exception as error:
            if sample := format_sample(error):
                add_note(error, f"raised for {sample}")
            self._note_answer(is_error=True)
            raise
        self._note_answer(is_error=is_omitted)
        return batch, is_omitted

    def _without_failed(self, made: Any) -> tuple[Any, bool]:
        """Return a batch, and whether none of its samples could be fetched. Record the samples that
        it lacks, or raise the exception of the first one."""
        skips = self._progress.skips
        skips.begin()
        if type(made) is not PartialBatch:
            return made, False
        number = self._progress.pulled_count - 1
        samples = described(made.failures, skips.max_skipped + 1)
        report = SkipReport(number, made.is_omitted, samples, None)
        error = made.failures[0].error
        made.drop_errors()
        reason = skips.reason_to_raise(report)
        if not reason:
            skips.note(report, self._progress.place_of(number))
            if self._progress.visits is not None:
                self._progress.visits.note_failed(self._progress.place_of(number), report.samples)
            return made.batch, made.is_omitted
        note_reason(error, reason)
        try:
            raise error
        finally:
            del error  # which its frames would keep alive

    def record_steps(self, count_max: int) -> None:
        """Keep no records: a step itself shows when its batch was made."""

    def step_records(self) -> list[dict[str, Any]]:
        return []

    def counters(self) -> dict[str, Any]:
        """Return the counters of all iterators of the loader."""
        return self._counters

    def _note_answer(self, is_error: bool) -> None:
        fetcher, progress = self._dataset_fetcher, self._progress
        shard_id = fetcher.shard_id if isinstance(fetcher, InProcessFetcher) else 0
        is_map = self._dataset_kind == DatasetKind.Map
        answer = progress.answer_pulled if is_map else progress.answer
        answer(shard_id, is_error)


class _Outcome(NamedTuple):
    """Batch, or the exception in its place."""

    batch: Any
    error: Exception | None

    @staticmethod
    def of(make: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(make(), None)
        except Exception as error:
            return _Outcome(None, error)

    def give(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.batch


def _place_of_pulled(iterator: weakref.ref[SingleProcessIter]) -> int:
    live = iterator()
    return 0 if live is None else live._place_of_pulled()


def _only_shard(fetcher: Any, dataset: Any) -> list[Any]:
    return [shard_state(fetcher, dataset)]
