# SPDX-License-Identifier: Apache-2.0
"""The next batches of a stream, for caches that prefetch the rows these batches will read.

A loader knows its future: the order is drawn before the batches are made, and batches wait in the
trainer before it needs them. Bagpipe ("Bagpipe: Accelerating Deep Recommendation Model Training",
Agarwal et al., SOSP 2023, doi 10.1145/3600006.3613142) reads the embedding ids of upcoming batches,
so that a cache in front of a slow table holds the rows before they are requested.

Lookahead has no side effects: the stream, the generators, the state and the times of the sampler's
pulls equal the ones of a program without lookahead. So only the values of batches already requested
are visible. They wait in the stream, in their order; the requests that would have followed them are
made when the trainer receives them.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from penstock import _C
from penstock.compat.iterators import DatasetKind
from penstock.errors import UnsupportedError
from penstock.loader.loader_run import LoaderRun
from penstock.ranks.steps import Ready
from penstock.stream.indices import IndexOrder

if TYPE_CHECKING:
    from penstock.stream.progress import Progress


class NoBatch(enum.Enum):
    """Events of a client that has no batch."""

    END = enum.auto()  # all requests were answered
    LATE = enum.auto()  # no answer within the loader's timeout


# The details of a batch of which no sample is left, with on_error="skip"; next() passes over it.
OMITTED = object()
# A batch with its details (its leaves, or True or False if the value is to be raised), its shard
# and the shard's state (with on_error="skip", a SkipReport with that state); or the exception that
# next() raises in its place.
Taken = tuple[Any, Any, int, Any] | Exception | NoBatch


class LooksAhead:
    """Part of an iterator over workers that looks ahead. Confined to the trainer's thread."""

    _ahead: deque[Taken]  # the events that wait in the stream, as Python objects
    _order: IndexOrder | None  # if the sampler is torch's
    _progress: Progress
    _prefetch_factor: Any  # an int, with workers
    _prefetch_depth: int
    _num_workers: int
    _in_order: bool
    _shutdown: bool
    _dataset_kind: int
    _asks_while_room: bool

    _stream: _C.Stream

    def _take(self, ahead_count: int = 0, within_s: float | None = None) -> Taken:
        """Wait for the next batch in order; with ``ahead_count`` only look at it. Return LATE if it
        does not arrive ``within_s``."""
        raise NotImplementedError

    def _unanswered(self) -> deque[Any]:
        """Return the indices that a sampler other than torch's gave for batches not yet
        received."""
        raise NotImplementedError

    def _end_or_raise(self, taken: Taken) -> NoReturn:
        """Do the work of next() when there is no batch."""
        raise NotImplementedError

    def lookahead(self, batch_count: int, select: Callable[[Any], Any] | None = None) -> list[Any]:
        """Look ahead in this iterator's stream, as :meth:`penstock.DataLoader.lookahead`."""
        check_arguments(batch_count, select)
        if not self._in_order:
            raise UnsupportedError(
                f"lookahead({batch_count}) requires in_order=True, got in_order=False, with which "
                f"the next batch cannot be known; make the loader with in_order=True"
            )
        if self._progress.is_finished or self._shutdown:
            return []
        if select is None:
            return self._indices_ahead(batch_count)
        self._check_depth(batch_count)
        self._take_ahead(batch_count)
        taken: Any = itertools.takewhile(_is_batch, [*itertools.islice(self._ahead, batch_count)])
        return [select(batch[0]) for batch in taken if batch[1] is not OMITTED]

    def _indices_ahead(self, batch_count: int) -> list[Any]:
        if self._dataset_kind == DatasetKind.Iterable:
            raise UnsupportedError(
                f"lookahead({batch_count}) cannot return the indices of an IterableDataset, which "
                f"has none; pass select=, which receives the batches"
            )
        if self._order is not None:
            return indices_from(self._order, self._progress.answered_count, batch_count)
        self._check_depth(batch_count)
        if self._asks_while_room and len(self._unanswered()) < batch_count:
            self._take_ahead(batch_count)  # pulls the sampler for the others
        asked = itertools.islice(self._unanswered(), batch_count)
        return [index.copy() if type(index) is list else index for index in asked]

    def _take_ahead(self, batch_count: int) -> None:
        """Make ``batch_count`` batches wait here, or fewer if the epoch ends or one raises.

        Blocks until they have arrived. Raises the exceptions of next() when one does not arrive
        within the timeout, and then leaves everything unchanged.
        """
        while len(self._ahead) < batch_count:
            if self._ahead and not _is_batch(self._ahead[-1]):
                return
            try:
                taken = self._take(batch_count)
            except Exception as error:
                taken = _without_frames(error)
            if taken is NoBatch.LATE:
                self._end_or_raise(taken)
            if taken is NoBatch.END:
                return
            self._ahead.append(taken)

    def _ready_ahead(self, count_max: int, wait_s: float) -> Ready:
        """Make up to ``count_max`` received batches wait here. Waits for the first one."""
        is_all = False
        while len(self._ahead) < count_max and (not self._ahead or _is_batch(self._ahead[-1])):
            try:
                taken = self._take(len(self._ahead) + 1, 0.0 if self._ahead else wait_s)
            except Exception as error:
                taken = _without_frames(error)
            is_all = taken is NoBatch.END
            if isinstance(taken, NoBatch):
                break
            self._ahead.append(taken)
        raises = bool(self._ahead) and not _is_batch(self._ahead[0])
        return Ready(len(self._ahead), is_all, raises)

    def _check_depth(self, batch_count: int) -> None:
        worker_count, who = self._guaranteed_workers()
        factor = int(self._prefetch_factor)
        if batch_count > factor * worker_count:
            raise ValueError(
                f"lookahead({batch_count}) must not exceed the {factor * worker_count} batches "
                f"that are certain to be requested (prefetch_factor={factor} and {who}); raise "
                f"prefetch_factor to {-(-batch_count // worker_count)}, or look fewer batches ahead"
            )

    def _guaranteed_workers(self) -> tuple[int, str]:
        """Return the number of workers that certainly exist, and this number in words."""
        return self._num_workers, f"num_workers={self._num_workers}"


def look_ahead(run: LoaderRun, batch_count: int, select: Callable[[Any], Any] | None) -> list[Any]:
    """Call ``lookahead()`` of the loader's newest iterator."""
    check_arguments(batch_count, select)
    iterator = run.newest
    if iterator is None:
        if run.progress is not None and run.progress.is_finished:
            return []
        raise ValueError(
            f"lookahead({batch_count}) requires an iterator of this loader in use; call it within "
            f"the for loop, or after iter(loader) while the iterator is kept"
        )
    if not hasattr(iterator, "lookahead"):
        raise UnsupportedError(
            f"lookahead({batch_count}) does not support torch's iterator, which is used here: "
            f"{run.fallback_reason}; use another dataset to look ahead"
        )
    found: list[Any] = iterator.lookahead(batch_count, select)
    return found


def check_arguments(batch_count: Any, select: Any) -> None:
    if type(batch_count) is not int:
        raise TypeError(
            f"the number of batches of lookahead() must be an int >= 1, got {batch_count!r}"
        )
    if batch_count < 1:
        raise ValueError(f"the number of batches of lookahead() must be >= 1, got {batch_count}")
    if select is not None and not callable(select):
        raise TypeError(
            f"select must be a function of a batch, or None for the indices, got {select!r}"
        )


def indices_from(order: IndexOrder, place: int, batch_count: int) -> list[list[int]]:
    """Return ``batch_count`` batches from number ``place`` on, or fewer if the epoch ends."""
    batches: list[list[int]] = []
    while len(batches) < batch_count and (batch := order.batch(place + len(batches))) is not None:
        batches.append(batch)
    return batches


def _is_batch(taken: Taken) -> bool:
    """Return whether the trainer will get a batch, and no exception in its place."""
    return type(taken) is tuple and type(taken[1]) is not bool


def _without_frames(error: Exception) -> Exception:
    """Return the error without its frames, which would keep the iterator that keeps the error, and
    with it the workers."""
    if error.__suppress_context__:
        # Not by the class's setter, which may raise.
        BaseException.__setattr__(error, "__context__", None)
    return error.with_traceback(None)
