# SPDX-License-Identifier: Apache-2.0
"""Iterator of ``pool=``: the workers of a pool, on this machine or others, make the batches."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from penstock import _C
from penstock.compat.iterators import DatasetKind
from penstock.errors import PenstockError, UnsentBatchError
from penstock.graph.link import Link
from penstock.loader.loader_run import LoaderRun
from penstock.loader.local_iterator import LocalPoolIter
from penstock.loader.lookahead import NoBatch, Taken
from penstock.loader.options import LoaderOptions
from penstock.loader.pool_source import PoolSource
from penstock.loader.source import StreamOptions
from penstock.loader.variable_pool import pool_remedy
from penstock.pool.worker_errors import make_error
from penstock.program_line import warn
from penstock.worker.fetching import FetchSpec
from penstock.worker.partial_batch import SkipReport

_ITERATORS_OWN = ("penstock.", "torch.utils.data.")
_AHEAD_MAX = 1 << 20  # requests after the last answer, more than a trainer makes


@functools.cache  # once in a process
def _report_seeding() -> None:
    if os.environ.get("RANK", "0") != "0":  # one of several ranks warns
        return
    print(
        'penstock: batches of a pool use the random numbers of seeding="batch", which are the same '
        "for any workers but differ from the numbers of torch's workers. To have the same stream "
        'with and without a pool, without this message, pass seeding="batch"',
        file=sys.stderr,
        flush=True,
    )


class PoolIter(LocalPoolIter):
    """Batches from a pool's workers, and from ``num_workers`` local ones in addition."""

    source: PoolSource
    _is_elastic = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        options = LoaderOptions.of(loader)
        self._pool_remedy = pool_remedy(options.pool)
        self._trusts_workers = options.trust_workers
        if options.seeding is None and not options.shard_by_rank:
            _report_seeding()
        try:
            super().__init__(loader)
        except BaseException as error:
            self._end_after_error()
            if isinstance(error, (PenstockError, pickle.PicklingError)):
                self._append_remedy(error)
            raise

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            raise
        except BaseException as error:
            # Unless the program has the iterator in a variable, it ends here and leaves the pool.
            self.source.may_be_cached = False
            del self
            release_frames(error)
            raise

    def _end_after_error(self) -> None:
        if not self._shutdown:
            self.source.may_be_cached = False
            self._shutdown_workers()

    def _settle_num_workers(self, options: LoaderOptions) -> None:
        shards = options.shard_count
        self._own_worker_count = int(self._num_workers)
        # The number of batches requested ahead follows from the number of workers.
        self._num_workers = 1
        if self._dataset_kind == DatasetKind.Iterable and shards == 1:
            warn(
                f"{type(options.dataset).__name__} is read in 1 shard, by one worker of the pool "
                f"at a time; pass shards=N to DataLoader to let up to N workers read it "
                f"concurrently",
            )

    def _make_source(
        self, options: LoaderOptions, run: LoaderRun, of_stream: StreamOptions, fetch: FetchSpec
    ) -> PoolSource:
        count, remedy = self._own_worker_count, self._pool_remedy
        return PoolSource(options, run, of_stream, fetch, count, remedy)

    def _take(self, ahead_count: int = 0, within_s: float | None = None) -> Taken:
        try:
            taken = super()._take(ahead_count, within_s)
        except BaseException as error:
            self.source.is_sound = False
            if isinstance(error, PenstockError):
                self._append_remedy(error)
            raise
        if type(taken) is tuple and isinstance(taken[0], UnsentBatchError):
            self._append_remedy(taken[0])
        return taken

    def _read_report(self, state: bytes) -> SkipReport:
        report = SkipReport.of_plain(_C.decode_value(state))  # data of others, never unpickled
        point = self._progress.point
        first = 0 if point is None else point.left.delivered_count
        if not first <= report.number < self._progress.answered_count + _AHEAD_MAX:
            raise PenstockError(
                f"a worker reports skipped samples of batch {report.number}, which was not "
                f"requested; trainer and workers must run the same version of penstock"
            )
        return report

    def _state_of(self, report: SkipReport, shard_id: int) -> bytes | None:
        # The native account has taken the report for a dataset state, of which there is none here.
        self._progress.counts.set_shard_state(shard_id, b"")
        return None

    def _error_of(self, report: SkipReport) -> Exception:
        type_name, text = report.error
        return make_error(type_name, text, "in a penstock worker")

    @property
    def _loads(self) -> Callable[[bytes, list[torch.Tensor]], Any] | None:
        return super()._loads if self._trusts_workers else None

    def first_answer(self) -> Any:
        """Return the first batch, or the exception in its place; None if there is neither. It waits
        here for next(). Raises the exceptions of next() for a batch that does not arrive."""
        self._take_ahead(1)
        taken = self._ahead[0] if self._ahead else None
        return taken[0] if type(taken) is tuple else taken

    def _end_or_raise(self, taken: Taken) -> NoReturn:
        if taken is NoBatch.END:
            self.source.may_be_cached = True
        super()._end_or_raise(taken)

    def _append_remedy(self, error: Exception) -> None:
        if self._pool_remedy:
            error.args = (f"{error}{self._pool_remedy}",)

    @property
    def link(self) -> Link:
        """Return the network link to the pool's workers."""
        workers, bytes_per_s = self._stream.load_counters()[5:]
        return Link(max(1, workers), bytes_per_s, self.source.recaller is None)

    def _guaranteed_workers(self) -> tuple[int, str]:
        return 1, "a pool, which may have one worker"


def release_frames(error: BaseException) -> None:
    """Clear the variables of the frames of penstock and of torch's iterators in ``error``.

    A traceback keeps the frames that it passed, and their variables: an iterator that raised would
    live as long as its error, in a list of errors or in ``sys.last_traceback``, and would keep its
    resources in other processes.

    Call after the error has left those frames. The user's frames (of a sampler, of the program)
    keep their variables for a debugger.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        _clear(current.__traceback__)
        current = current.__context__


def _clear(traceback: TracebackType | None) -> None:
    while traceback is not None:
        frame = traceback.tb_frame
        traceback = traceback.tb_next
        if not str(frame.f_globals.get("__name__", "")).startswith(_ITERATORS_OWN):
            continue
        try:
            frame.clear()
        except RuntimeError:
            pass  # it still runs: the caller's
