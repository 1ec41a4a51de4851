# SPDX-License-Identifier: Apache-2.0
"""Torch's fetcher of map-style datasets with additions: it records which sample raised, measures
each sample's time, and copies each sample into its row of the batch.

**The sample that raised.** The traceback shows the failing line of the dataset, but not the index.
The index is in a variable of a frame that the exception has passed through: the exception itself is
not modified, since it belongs to the user and its class may not permit that.

**Rows.** Torch's default_collate needs all samples of a batch together, so a worker holds them
twice: as fetched, and stacked. With rows, a sample's large tensors are dropped before the next
sample is made, which then finds their memory in the processor's caches. A tensor to which the
dataset or any other object still refers is kept unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from penstock import _C
from penstock.compat.iterators import MapDatasetFetcher
from penstock.stream.batch_seeds import selected
from penstock.stream.shard_state import draws_nothing
from penstock.stream.table_rows import is_collate_map_untouched

_FIRST_LINE = "Traceback (most recent call last):\n"
_INDEX = "failed_index"  # the variable with the index, in a frame of this package
_PACKAGE = "penstock."
# Faster samples are not timed one by one: that would add more than a hundredth to their time.
_TIMED_SAMPLE_S = 20e-6
# After a batch whose samples have no tensors to move, so many batches are fetched without a check.
_UNCHECKED_BATCHES = 31


class NamingMapFetcher(MapDatasetFetcher):
    """Torch's fetcher of map-style datasets, which also records the sample that raised.

    Batches whose indices are not a list are not recorded. Confined to one thread.
    """

    def fetch(self, possibly_batched_index: Any) -> Any:
        if not self.auto_collation or type(possibly_batched_index) is not list:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        # Torch iterates over it itself, unless the dataset takes whole lists, as a Subset does.
        is_given_on = hasattr(self.dataset, "__getitems__")
        indices: Any = possibly_batched_index
        walked: Any = _TrackedList(indices) if is_given_on else iter(indices)
        try:
            return super().fetch(walked)  # type: ignore[no-untyped-call]
        except BaseException:
            if (place := _next_place(walked.walk if is_given_on else walked)) > 0:
                failed_index = indices[place - 1]  # noqa: F841 - for format_sample()
            raise


class _TrackedList(list[Any]):
    """A list that keeps the last iterator over it."""

    walk: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.walk = super().__iter__()
        return self.walk


def _next_place(walk: Iterator[Any] | None) -> int:
    """Return the index of the next item of a list's iterator; 0 before the first item and after the
    end."""
    # As for copy.copy(): (iter, (list,), index), without an index after the end.
    parts: Any = () if walk is None else walk.__reduce__()
    return parts[2] if len(parts) == 3 else 0


def format_sample(error: BaseException) -> str:
    """Return a text such as "sample 12 of the dataset" for the index passed to the dataset.

    Return "" if the batch failed as a whole, in ``__getitems__`` or ``collate_fn``.
    """
    variables = _variables_with_index(error.__traceback__)
    return f"sample {variables[_INDEX]!r} of the dataset" if _INDEX in variables else ""


def _variables_with_index(traceback: TracebackType | None) -> dict[str, Any]:
    """Return the variables of the outermost frame with the index: in an exception that is raised
    again, the earlier frames are below the current ones."""
    while traceback is not None:
        frame = traceback.tb_frame
        is_own = str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
        if is_own and _INDEX in frame.f_code.co_varnames:
            return frame.f_locals
        traceback = traceback.tb_next
    return {}


def name_sample(text: str, sample: str) -> str:
    """Insert the sample below the first line of a traceback; its last lines stay as in torch."""
    if not sample or not text.startswith(_FIRST_LINE):
        return text
    return f"{_FIRST_LINE}  ({sample})\n{text[len(_FIRST_LINE) :]}"


def timed_collate(clock: _C.FetchClock, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``collate_fn`` with a call that reports its start to ``clock``."""
    return _C.TimedCollate(collate_fn, clock, draws_nothing(collate_fn))


class TimedMapFetcher(NamingMapFetcher):
    """Torch's fetcher of map-style datasets that do not define ``__getitems__`` themselves. It
    reports the time of each sample to a clock, unless the samples of the previous batch were too
    fast for that. Confined to one thread."""

    def __init__(
        self,
        clock: _C.FetchClock,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, auto_collation, collate_fn, drop_last)
        self._dataset = dataset
        self._timed = _C.TimedSamples(dataset, clock)
        self._is_slow = True

    def fetch(self, possibly_batched_index: Any) -> Any:
        began_at = time.perf_counter()
        self.dataset = self._timed if self._is_slow else self._dataset
        try:
            batch = super().fetch(possibly_batched_index)
        finally:
            self.dataset = self._dataset
        if type(possibly_batched_index) is list:  # any other value is iterated once
            spent_s = time.perf_counter() - began_at
            self._is_slow = spent_s > len(possibly_batched_index) * _TIMED_SAMPLE_S
        return batch


class SampleRows(Protocol):
    """The part of the slab into which the samples of the current batch are moved."""

    def begin(self, sample_count: int) -> None: ...

    def fetch(self, dataset: Any, index: Any) -> Any: ...

    def end(self) -> bool:
        """Return whether any sample had a tensor that can be moved."""
        ...


class RowFetcher(MapDatasetFetcher):
    """Torch's fetcher of map-style datasets that do not define ``__getitems__`` themselves, and
    whose ``collate_fn`` is default_collate. Confined to one thread.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        rows: SampleRows,
        plain: MapDatasetFetcher,
    ) -> None:
        """``plain`` fetches batches whose samples have no tensors to move."""
        super().__init__(dataset, True, collate_fn, drop_last)
        self._plain = plain
        self._rows = rows
        self._in_rows = NamingMapFetcher(_InRows(dataset, rows), True, collate_fn, drop_last)
        self._unmoved_count = 0  # of batches to fetch as torch does

    def fetch(self, possibly_batched_index: Any) -> Any:
        indices = possibly_batched_index
        if self._unmoved_count > 0 or type(indices) is not list or not is_collate_map_untouched():
            self._unmoved_count = max(0, self._unmoved_count - 1)
            return self._plain.fetch(indices)
        self._rows.begin(len(indices))
        try:
            return self._in_rows.fetch(indices)
        finally:
            self._unmoved_count = 0 if self._rows.end() else _UNCHECKED_BATCHES


class _InRows:
    def __init__(self, dataset: Any, rows: SampleRows) -> None:
        self._dataset = dataset
        self._fetch = rows.fetch

    def __getitem__(self, index: Any) -> Any:
        return self._fetch(*selected(self._dataset, index))
