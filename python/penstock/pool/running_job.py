# SPDX-License-Identifier: Apache-2.0
"""A trainer's job at a pool worker: make and answer each requested batch."""

from __future__ import annotations

import os
import random
import struct
from collections import OrderedDict
from collections.abc import Callable, Sized
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from penstock import _C
from penstock.compat.iterators import DatasetKind, WorkerInfo, numpy_seed, set_worker_info
from penstock.errors import ClosedError, UnsupportedError
from penstock.images import open_natively
from penstock.pool.pool_job import Job
from penstock.pool.process_settings import ProcessState
from penstock.pool.worker_errors import UNSENT_BATCH, describe_error, end_forked_child
from penstock.stream.batch_seeds import EpochSeeds
from penstock.stream.batch_types import install as install_batch_types
from penstock.stream.shard_state import ShardStart, ShardStarts, StateFailure
from penstock.stream.table_rows import plain_rows
from penstock.worker.automatic_threads import make_pool
from penstock.worker.batch_pickle import dumps
from penstock.worker.fetching import BatchPlace, FetchSpec, SeededFetcher, copy_for_shard
from penstock.worker.fingerprint import Fingerprint, fingerprint
from penstock.worker.partial_batch import PartialBatch, SkipReport, described
from penstock.worker.read_ahead import ReadAhead
from penstock.worker.request_feed import indices_of, unwrap_indices
from penstock.worker.slab_collate import collating_into
from penstock.worker.threaded_fetch import FetchPool

_EPOCHS_MAX = 2  # the last batches of one epoch and the first of the next may alternate
_LOOK_S_MIN = 0.005
_BATCH_COUNT = struct.Struct("<Q")
_SEEDS = struct.Struct("<qqq")  # as loader::EpochSeeds writes them
# The answer in the place of a batch without samples; the trainer reads the report with it.
_OMITTED = ("penstock.OmittedBatch", "no sample of the batch could be fetched")


class RunningJob:
    """Confined to the thread that makes batches."""

    def __init__(self, server: _C.BatchServer, job: Job, seeds: EpochSeeds) -> None:
        """``seeds`` belong to the first batch; the draws of worker_init_fn depend on them, too."""
        self.name = job.name
        self.code_folders = job.code_folders
        self._server = server
        self._job = job
        install_batch_types(job.fetch.batch_types)
        self._pid = os.getpid()
        self._fetch = collating_into(server, job.fetch)
        self._is_iterable = job.fetch.dataset_kind == DatasetKind.Iterable
        self._counted: _CountedCollate | None = None
        if self._is_iterable and job.fetch.auto_collation:
            self._counted = _CountedCollate(self._fetch.collate_fn)
            self._fetch = replace(self._fetch, collate_fn=self._counted)
        self._dumps = dumps if job.trust_workers else None
        self._epochs: OrderedDict[tuple[int, bytes], _Epoch] = OrderedDict()
        self._threads = make_pool(job.fetch.fetch_threads)
        self._trainer_id = self._newest_epoch = -1
        self._init_error = self._initialise(job.init_fn, seeds.base_seed)
        self._rows = None
        if self._init_error is None and job.fetch.auto_collation:
            self._rows = plain_rows(job.fetch.dataset, job.fetch.collate_fn)
        # The requests that wait are in the worker's server, so only a batch's own files are known.
        is_by_file = not self._is_iterable and self._rows is None
        self._read_ahead = ReadAhead.of(job.fetch.dataset) if is_by_file else None
        # Whether a batch is a function of its request. A report of skipped samples is not.
        self._has_pure_batches = (
            job.may_be_kept and not self._is_iterable and job.fetch.max_skipped is None
        )

    def _initialise(
        self, init_fn: Callable[[int], None] | None, base_seed: int
    ) -> tuple[str, str] | None:
        """Do the work of a local worker before its first batch. Return the error, if there was
        one.
        """
        set_worker_info(
            WorkerInfo(id=0, num_workers=1, seed=base_seed, dataset=self._job.fetch.dataset)
        )
        random.seed(base_seed)
        torch.manual_seed(base_seed)
        np.random.seed(numpy_seed(base_seed, 0))
        try:
            if init_fn is not None:
                init_fn(0)
        except BaseException as error:
            return self._describe_error(error)
        return None

    def _describe_error(self, error: BaseException) -> tuple[str, str]:
        """Describe any exception of the user's code: even an exit or an interrupt is an error of
        its batch, and does not end the worker."""
        end_forked_child(self._pid, error)
        return describe_error(error)

    def begin_watch(self, made_in_s: float) -> None:
        """Call before the first batch. ``made_in_s`` is the time for fetching and unpacking the
        job. An inspection for changes by batches takes no longer than repeating that."""
        self._look_s = max(_LOOK_S_MIN, made_in_s)
        self._before = self._look()
        self._process_before = ProcessState.now()

    def begin_epoch(self, work: _C.PoolWork) -> bool:
        """Record the epoch of a request. Return whether it is later than the epochs of earlier
        requests, or from another trainer."""
        is_new = work.trainer_id != self._trainer_id or work.epoch > self._newest_epoch
        if is_new:
            self._trainer_id, self._newest_epoch = work.trainer_id, work.epoch
        return is_new

    def is_unchanged(self) -> bool:
        """Return whether the dataset, all objects that it refers to, and the process are known to
        be unchanged since the job was unpacked."""
        if self._rows is not None:
            return _C.are_own(self._rows)
        if self._before is None:
            return False
        return self._look() == self._before and ProcessState.now() == self._process_before

    def _look(self) -> Fingerprint | None:
        fetch = self._job.fetch
        roots = (fetch.dataset, fetch.collate_fn, self._job.init_fn)
        return fingerprint(*roots, cost_s_max=self._look_s)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def answer(self, work: _C.PoolWork) -> None:
        """Make and send the batch of a request, or a description of the exception instead. Raise
        ClosedError if this worker ends meanwhile.
        """
        if self._init_error is not None:
            self._server.answer_error(work, *self._init_error, None)
            return
        if self._job.is_of_cpp and work.lane == 0 and work.indices() is None:
            self._describe(work)
            return
        if work.is_recall and self._server.answer_kept(work):
            return
        if self._rows is not None and self._server.answer_rows(
            work,
            self._rows,
            len(self._rows[0]) if self._job.is_of_cpp else None,
            self._has_pure_batches and self._job.init_fn is None,
        ):
            return
        shard_id = max(work.lane - 1, 0)
        raised: tuple[str, str] | None = None
        epoch: _Epoch | None = None
        batch: Any = None
        indices: Any = None
        state: bytes | None = None
        self._server.begin()
        open_natively()
        # An error must not be kept in a variable: its traceback would keep this frame, and the
        # batch, alive.
        try:
            epoch = self._epoch_of(work)
            epoch.fetcher.watches_draws = work.is_named
            if self._is_iterable:
                epoch.find_lane(work, shard_id)
            place = BatchPlace(work.sequence, shard_id, work.first_place)
            indices, place = unwrap_indices(indices_of(work), place)
            if self._read_ahead is not None:
                self._read_ahead.note(indices)
            batch = epoch.fetch(indices, place)
        except BaseException as error:
            if self._is_iterable and isinstance(error, StopIteration):
                self._server.answer_end(work)
                return
            raised = self._describe_error(error)
        try:
            state = epoch.state(shard_id) if self._is_iterable and epoch is not None else None
        except BaseException as error:
            raised = self._describe_error(error)
        if raised is None and epoch is not None:
            try:
                sample_count = self._sample_count(indices)
                if type(batch) is PartialBatch:  # of a map-style dataset, which has no state here
                    state = self._report_of(batch, work)
                    if batch.is_omitted:
                        self._server.answer_error(work, *_OMITTED, state)
                        return
                    sample_count -= len(batch.failures)
                    batch = batch.batch
                self._server.answer(
                    work,
                    batch,
                    epoch.fetcher.threads_drew,
                    state,
                    self._dumps,
                    sample_count,
                    self._dataset_size,
                    may_be_kept=self._has_pure_batches and not epoch.fetcher.threads_drew,
                    # worker_init_fn may draw, from the seed of the job's first batch here.
                    draws_nothing=epoch.fetcher.drew_nothing and self._job.init_fn is None,
                )
                return
            except ClosedError:
                raise
            except UnsupportedError as error:
                raised = (UNSENT_BATCH, describe_error(error)[1])
            except BaseException as error:
                raised = self._describe_error(error)
        assert raised is not None
        self._server.answer_error(work, *raised, state)

    def _report_of(self, batch: PartialBatch, work: _C.PoolWork) -> bytes:
        samples = described(batch.failures, (self._job.fetch.max_skipped or 0) + 1)
        error = self._describe_error(batch.failures[0].error)
        batch.drop_errors()
        report = SkipReport(work.sequence, batch.is_omitted, samples, error)
        return _C.encode_value(report.to_plain(), "the list of skipped samples")

    def _describe(self, work: _C.PoolWork) -> None:
        """Send the dataset's kind and size to a trainer that cannot inspect it."""
        try:
            size = None if self._is_iterable else len(self._job.fetch.dataset)
        except BaseException as error:
            self._server.answer_error(work, *self._describe_error(error), None)
            return
        self._server.begin()
        shape = {"iterable": self._is_iterable, "size": size}
        self._server.answer(work, shape, False, None, None, 0, -1 if size is None else size)

    @cached_property
    def _dataset_size(self) -> int | None:
        """The dataset's size, -1 for an iterable one. It is sent with each batch to a trainer
        without a dataset object, which checks by it that all workers have the same dataset."""
        if not self._job.is_of_cpp:
            return None
        return -1 if self._is_iterable else len(self._job.fetch.dataset)

    def _sample_count(self, indices: Any) -> int:
        """Return how many samples the batch just made from ``indices`` has; 1 without a length."""
        if self._counted is not None:
            return self._counted.sample_count
        is_batch = self._job.fetch.auto_collation and isinstance(indices, Sized)
        return len(indices) if is_batch else 1

    def _epoch_of(self, work: _C.PoolWork) -> _Epoch:
        key = (work.epoch, work.seeds)
        if key not in self._epochs:
            self._epochs[key] = _Epoch(
                self._fetch, self._threads, self._job.shard_count, seeds_of(work), self._server
            )
            if len(self._epochs) > _EPOCHS_MAX:
                self._epochs.popitem(last=False)
        return self._epochs[key]


class _CountedCollate:
    """A collate_fn of an iterable dataset that records how many samples it was given last."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self.draws_nothing = getattr(collate_fn, "draws_nothing", False)
        self.sample_count = 0

    def __call__(self, samples: Any) -> Any:
        self.sample_count = len(samples)
        return self._collate_fn(samples)


class _Epoch:
    """One pass over the dataset. Shards may be added and withdrawn during it: each starts with a
    separate copy of the dataset, as it would in a separate worker."""

    def __init__(
        self,
        fetch: FetchSpec,
        threads: FetchPool | None,
        shard_count: int,
        seeds: EpochSeeds,
        server: _C.BatchServer,
    ) -> None:
        self._spec = fetch
        self._datasets: dict[int, Any] = {}
        self._starts: ShardStarts = {}
        self._ended: set[int] = set()
        self._tenancies: dict[int, int] = {}  # in which each shard started
        self.fetcher = SeededFetcher(
            fetch, threads, self._datasets, shard_count, seeds, self._starts, server.begin
        )

    def find_lane(self, work: _C.PoolWork, shard_id: int) -> None:
        """If the request asks for it, start a shard at its first batch, or continue it where
        another worker left it.

        Raise RuntimeError for a shard that did not start here: the batch is no longer needed, and
        the trainer's message about that is still on its way.
        """
        if work.is_lane_start:
            self._tenancies.pop(shard_id, None)
            self._ended.discard(shard_id)
            self.fetcher.forget(shard_id)
            start = _start_of(work.state)
            self._starts.pop(shard_id, None)
            if start is not None:
                self._starts[shard_id] = start
            self._datasets[shard_id] = copy_for_shard(self._spec, shard_id)
            self._tenancies[shard_id] = work.tenancy
        elif self._tenancies.get(shard_id) != work.tenancy:
            raise RuntimeError(
                f"shard {shard_id} of epoch {work.epoch} was not started at this worker"
            )

    def fetch(self, indices: Any, place: BatchPlace) -> Any:
        if place.shard_id in self._ended:
            raise StopIteration
        try:
            return self.fetcher.fetch(indices, place)
        except StopIteration:
            self._ended.add(place.shard_id)
            raise

    def state(self, shard_id: int) -> bytes | None:
        """Return the state for continuing the shard elsewhere. Without it, the shard is reread."""
        state = self.fetcher.state(shard_id)
        if state is None or isinstance(state, StateFailure):
            return None
        return _C.encode_value(state, "the dataset's state")


def seeds_of(work: _C.PoolWork) -> EpochSeeds:
    return EpochSeeds(*_SEEDS.unpack(work.seeds))


def _start_of(state: bytes) -> ShardStart | None:
    """Return where a lane starts, as sent by the trainer."""
    if not state:
        return None
    (batch_count,) = _BATCH_COUNT.unpack_from(state)
    rest = state[_BATCH_COUNT.size :]
    return ShardStart(batch_count, _C.decode_value(rest) if rest else None)
