# SPDX-License-Identifier: Apache-2.0
"""Fetch the samples of a batch, and copy each into its row of the batch immediately.

Torch's default_collate needs all samples of a batch together, so a worker holds them twice: as
fetched, and stacked. Here, a sample's large tensors are dropped before the next sample is made,
which then finds their memory in the processor's caches. A tensor to which the dataset or any other
object still refers is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.compat.iterators import MapDatasetFetcher
from penstock.stream.batch_seeds import selected
from penstock.stream.table_rows import is_collate_map_untouched
from penstock.worker.failed_sample import NamingMapFetcher


class SampleRows(Protocol):
    """The part of the slab into which the samples of the current batch are moved."""

    def begin(self, sample_count: int) -> None: ...

    def fetch(self, dataset: Any, index: Any) -> Any: ...

    def end(self) -> bool:
        """Return whether any sample had a tensor that can be moved."""
        ...


# After a batch whose samples have no tensors to move, so many batches are fetched without a check.
_UNMOVED_BATCHES = 31


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
            self._unmoved_count = 0 if self._rows.end() else _UNMOVED_BATCHES


class _InRows:
    def __init__(self, dataset: Any, rows: SampleRows) -> None:
        self._dataset = dataset
        self._fetch = rows.fetch

    def __getitem__(self, index: Any) -> Any:
        return self._fetch(*selected(self._dataset, index))
