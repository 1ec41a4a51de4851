# SPDX-License-Identifier: Apache-2.0
"""The program of a local worker process: torch's worker loop on penstock's transport.

Seeds, worker info, ``worker_init_fn``, fetchers, exceptions and their texts are as in torch. There
are two differences: the source of requests, and that the batch is built in shared memory that the
trainer maps once.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock import _C
from penstock.compat.iterators import (
    DatasetKind,
    ExceptionWrapper,
    WorkerInfo,
    numpy_seed,
    set_worker_info,
)
from penstock.errors import ClosedError
from penstock.images import open_natively
from penstock.stream.batch_seeds import EpochSeeds
from penstock.stream.batch_types import install as install_batch_types
from penstock.stream.shard_state import (
    ResumedDataset,
    ShardStarts,
    StateFailure,
    is_state_due,
    is_stateful,
    load_dataset_state,
    load_shard_between_epochs,
)
from penstock.stream.table_rows import plain_rows
from penstock.worker.automatic_threads import make_pool
from penstock.worker.batch_pickle import dumps
from penstock.worker.dataset_watch import DatasetWatch, FetchWatch, RowsWatch, Watch
from penstock.worker.fetching import (
    BatchPlace,
    Fetcher,
    FetchSpec,
    SeededFetcher,
    TorchFetcher,
    datasets_of_shards,
)
from penstock.worker.fingerprint import Fingerprint, fingerprint
from penstock.worker.map_fetchers import format_sample, name_sample
from penstock.worker.partial_batch import PartialBatch, SkipReport, described
from penstock.worker.read_ahead import ReadAhead
from penstock.worker.request_feed import RequestFeed, indices_of, make_preceding, unwrap_indices
from penstock.worker.slab_collate import collate_into_slabs, collating_into
from penstock.worker.threaded_fetch import FetchPool
from penstock.worker.worker_process import enable_stack_dump, set_up_process
from penstock.worker.worker_start import PickledOnce, StartPermit, release_in_child


class WorkerChannel:
    """A worker's end of its channel to the trainer, as an argument of its process.

    A forked process also has the trainer's ends of all channels that existed. It closes them: while
    any process holds one, the worker at its other end does not notice the trainer's death.
    """

    def __init__(self, fd: int, trainer_fds: Iterable[int] = ()) -> None:
        self._fd = fd
        self._trainer_fds = tuple(trainer_fds)

    def take(self) -> int:
        """Return the descriptor, which the caller must close. Call it once, in the worker."""
        for fd in self._trainer_fds:
            os.close(fd)
        return self._fd

    def __reduce__(self) -> Any:
        return _received_channel, (reduction.DupFd(self._fd),)


def _received_channel(fd: Any) -> WorkerChannel:
    return WorkerChannel(fd.detach())


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The arguments of all workers in addition to torch's. Picklable."""

    slab_count: int  # slabs for its answers
    arena_bytes: int
    any_worker: bool  # whether any worker may be asked for any batch
    trainer_pid: int
    shard_count: int
    is_seeded_by_batch: bool
    starts: ShardStarts  # of a resumed epoch; for a map-style dataset by worker
    states_before: dict[int, Any]  # of the shards' datasets when the epoch started, or None
    may_begin_early: bool  # whether the next epoch may be requested before it starts
    state_interval: int | None  # steps between states of the dataset; None: states are not needed


def worker_loop(
    permit: StartPermit,
    parts: PickledOnce,
    channel: WorkerChannel,
    base_seed: int,
    worker_id: int,
    num_workers: int,
) -> None:
    """Serve one trainer, at the other end of ``channel``, until it hangs up or dies.

    ``parts`` go to all workers: a FetchSpec, the worker_init_fn, and a WorkerSpec.
    """
    try:
        try:
            release_in_child()
            fetch, init_fn, spec = parts.value
            del permit, parts
            _work(fetch, init_fn, spec, channel, base_seed, worker_id, num_workers)
        finally:
            # A pending interrupt is raised here, where it is caught; a later one is ignored, since
            # this process ends.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # A new interpreter collects its cycles at exit; frozen ones would remain.
            gc.unfreeze()
    except KeyboardInterrupt:
        pass  # the trainer raises it, too


def _work(
    fetch: FetchSpec,
    init_fn: Callable[[int], None] | None,
    spec: WorkerSpec,
    channel: WorkerChannel,
    base_seed: int,
    worker_id: int,
    num_workers: int,
) -> None:
    _prepare(base_seed, worker_id)
    install_batch_types(fetch.batch_types)
    set_worker_info(
        WorkerInfo(
            id=worker_id, num_workers=num_workers, seed=base_seed + worker_id, dataset=fetch.dataset
        )
    )
    try:
        server = _C.WorkerServer.open(
            channel_fd=channel.take(),
            prefetch_factor=spec.slab_count,
            arena_bytes=spec.arena_bytes,
            waits_for_slabs=not spec.any_worker,
            trainer_pid=spec.trainer_pid,
        )
    except ClosedError:
        return  # the trainer has ended while this process started
    collate_into_slabs(server)
    shards = range(worker_id, spec.shard_count, num_workers)
    pool = make_pool(fetch.fetch_threads)
    try:
        _serve(server, fetch, init_fn, pool, worker_id, shards, spec)
    finally:
        if pool is not None:
            pool.close()


def _prepare(base_seed: int, worker_id: int) -> None:
    # The collector would write to every container that the trainer had at the fork, and the system
    # would copy its page. Objects that exist now live as long as the worker.
    gc.freeze()
    set_up_process()
    enable_stack_dump()
    random.seed(base_seed + worker_id)
    torch.manual_seed(base_seed + worker_id)
    np.random.seed(numpy_seed(base_seed, worker_id))


def _serve(
    server: _C.WorkerServer,
    fetch: FetchSpec,
    init_fn: Callable[[int], None] | None,
    pool: FetchPool | None,
    worker_id: int,
    shards: range,
    spec: WorkerSpec,
) -> None:
    where = f"in DataLoader worker process {worker_id}"
    init_error: ExceptionWrapper | None = None
    into_slab = collating_into(server, fetch)
    fetcher: Fetcher
    last: Fetcher | None = None  # that was last asked for a batch
    datasets: dict[int, Any] = {}
    starts = spec.starts
    resumed: dict[int, ResumedDataset] = {}
    every = spec.state_interval
    try:
        if init_fn is not None:
            init_fn(worker_id)
        if any(spec.states_before.get(shard_id) is not None for shard_id in shards):
            if fetch.dataset_kind == DatasetKind.Iterable and spec.is_seeded_by_batch:
                datasets = datasets_of_shards(fetch, shards)
            _load_states_before(datasets or {worker_id: fetch.dataset}, spec)
        if fetch.dataset_kind == DatasetKind.Map:
            load_dataset_state(fetch.dataset, starts.get(worker_id))
        if not spec.is_seeded_by_batch:  # otherwise even the first epoch is announced
            start = {worker_id: starts[worker_id]} if worker_id in starts else {}
            fetcher = TorchFetcher(into_slab, pool, start, server.begin, resumed)
    except Exception:
        init_error = ExceptionWrapper(where=where)
    rows = None
    if init_error is None and fetch.auto_collation:
        rows = plain_rows(fetch.dataset, fetch.collate_fn)
    ended_shards: set[int] = set()
    of_epochs: dict[int, Fetcher] = {}  # this one's and the early one's, seeded by batch
    watch = _watch(fetch, rows) if spec.may_begin_early and init_error is None else None
    is_map = fetch.dataset_kind == DatasetKind.Map
    read_ahead = ReadAhead.of(fetch.dataset) if is_map and rows is None else None
    repeats = FetchWatch(_watch(fetch, rows)) if spec.any_worker else None
    # A state or a look at the dataset between two batches must not see samples of later ones.
    is_looked_at = repeats is not None or is_stateful(fetch.dataset)
    looks_ahead = is_map and pool is not None and not is_looked_at
    feed = RequestFeed(server, rows, watch, read_ahead, looks_ahead)
    while True:
        try:
            request = feed.next()
        except ClosedError:
            return
        if request.is_epoch or request.is_early_epoch:
            ended_shards.clear()
            if spec.is_seeded_by_batch:
                seeds = EpochSeeds(*indices_of(request))
                datasets = datasets or datasets_of_shards(fetch, shards)
                fetcher = SeededFetcher(
                    into_slab,
                    pool,
                    datasets,
                    spec.shard_count,
                    seeds,
                    starts,
                    server.begin,
                    resumed,
                )
                # A batch of this epoch may be requested after an early start of the next one.
                of_epochs = {epoch: of_epochs[epoch] for epoch in list(of_epochs)[-1:]}
                of_epochs[request.epoch] = fetcher
                starts = {}  # later epochs of persistent workers start at their first batch
            else:
                fetcher = TorchFetcher(into_slab, pool, {}, server.begin, resumed)
            continue
        if request.is_for_states:
            every, question = request.indices()
            if question:
                states = {shard_id: _state_after(last, shard_id) for shard_id in shards}
                server.answer_states(request, pickle.dumps((question, worker_id, states)))
            continue
        if request.shard_id in ended_shards:
            continue
        server.begin()
        began_at = time.monotonic()
        open_natively()
        batch: Any
        raises = threads_drew = False
        state_after: bytes | None = None
        if init_error is not None:
            batch, raises = init_error, True
            if not spec.is_seeded_by_batch:
                init_error = None  # then there is no fetcher until the next epoch, as in torch's
        else:
            try:
                last = fetcher = of_epochs.get(request.epoch, fetcher)
                place = _place_of(request)
                if looks_ahead and pool is not None:
                    pool.look_ahead = partial(_look_ahead, feed, request, fetcher)
                indices = make_preceding(indices_of(request), place, fetcher.fetch, server.begin)
                batch = fetcher.fetch(*unwrap_indices(indices, place))
                threads_drew = fetcher.threads_drew
            except Exception as error:
                if isinstance(error, StopIteration) and fetch.dataset_kind == DatasetKind.Iterable:
                    ended_shards.add(request.shard_id)
                    state_after = None if every is None else _state_after(last, request.shard_id)
                    _answer_end(server, request, state_after)
                    continue
                sample = format_sample(error)
                # The traceback must not be kept in a variable: it would keep this frame, and the
                # batch, alive.
                batch, raises = ExceptionWrapper(where=where), True
                batch.exc_msg = name_sample(batch.exc_msg, sample)
            if every is not None and is_state_due(request.sequence, every, spec.shard_count):
                state_after = _state_after(last, request.shard_id)
            if fetch.max_skipped is not None:
                batch, is_omitted, state_after = _reported(
                    batch, state_after, request.sequence, fetch.max_skipped, where
                )
                raises = raises or is_omitted
        stays = repeats is not None and repeats.note_batch(time.monotonic() - began_at)
        marks = AnswerMarks(raises, threads_drew, stays, state_after)
        try:
            _answer(server, request, batch, marks, where)
        except ClosedError:
            return
        del batch, request


def _look_ahead(feed: RequestFeed, request: _C.WorkerRequest, fetcher: Fetcher) -> None:
    for one in feed.take_upcoming(request):
        fetcher.expect(one.indices(), _place_of(one))


def _place_of(request: _C.WorkerRequest) -> BatchPlace:
    return BatchPlace(request.sequence, request.shard_id, request.first_place)


def _load_states_before(datasets: dict[int, Any], spec: WorkerSpec) -> None:
    for shard_id, dataset in datasets.items():
        start, before = spec.starts.get(shard_id), spec.states_before.get(shard_id)
        if (start is None or start.state is None) and isinstance(before, dict):
            load_shard_between_epochs(dataset, before)


def _watch(fetch: FetchSpec, rows: list[torch.Tensor] | None) -> Watch:
    return RowsWatch(rows) if rows is not None else DatasetWatch(partial(_look, fetch))


def _look(fetch: FetchSpec, allowed_s: float) -> Fingerprint | None:
    return fingerprint(fetch.dataset, fetch.collate_fn, cost_s_max=allowed_s)


class AnswerMarks(NamedTuple):
    """Properties of a batch that are sent with its content."""

    raises: bool
    threads_drew: bool
    dataset_stays: bool  # the batches made so far have not changed it, as far as can be detected
    # Pickled: the state of the dataset and its iterator after the batch; a SkipReport with it if
    # samples are skipped.
    state: bytes | None


def _reported(
    batch: Any, state: bytes | None, number: int, max_skipped: int, where: str
) -> tuple[Any, bool, bytes | None]:
    """Return the batch itself, whether no sample is left for it, and the report that is sent with
    it; None if there is nothing to report."""
    if type(batch) is not PartialBatch:
        report = None if state is None else SkipReport(number, False, (), None, state)
        return batch, False, None if report is None else pickle.dumps(report)
    samples = described(batch.failures, max_skipped + 1)
    error = _pickled_error(batch.failures[0].error, where)
    batch.drop_errors()
    report = SkipReport(number, batch.is_omitted, samples, error, state)
    return batch.batch, batch.is_omitted, pickle.dumps(report)


def _pickled_error(error: Exception, where: str) -> bytes:
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where=where)
    wrapper.exc_msg = name_sample(wrapper.exc_msg, format_sample(error))
    try:
        return pickle.dumps(wrapper)
    except Exception:
        return pickle.dumps(_as_text(wrapper.exc_msg, where))


def _as_text(text: str, where: str) -> ExceptionWrapper:
    """Return the wrapper of an exception whose type cannot be pickled; its text can."""
    wrapper = ExceptionWrapper((RuntimeError, RuntimeError(text), None), where=where)
    wrapper.exc_msg = text
    return wrapper


def _state_after(fetcher: Fetcher | None, shard_id: int) -> bytes | None:
    state = None if fetcher is None else fetcher.state(shard_id)
    try:
        return None if state is None else pickle.dumps(state)
    except Exception as error:  # the batch itself is valid
        failure = f"the state of a shard cannot be pickled: {type(error).__name__}: {error}"
        return pickle.dumps(StateFailure(failure))


def _answer_end(server: _C.WorkerServer, request: _C.WorkerRequest, state: bytes | None) -> None:
    try:
        server.answer_end(request, state)
    except ClosedError:
        pass  # the next wait for a request ends the loop


def _answer(
    server: _C.WorkerServer,
    request: _C.WorkerRequest,
    batch: Any,
    marks: AnswerMarks,
    where: str,
) -> None:
    try:
        server.answer(request, batch, *marks, dumps)
    except ClosedError:
        raise
    except Exception as error:
        if marks.raises and batch is not None:
            wrapper = _as_text(batch.exc_msg, where)
        else:
            wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where=where)
        server.answer(request, wrapper, True, False, marks.dataset_stays, marks.state, dumps)
