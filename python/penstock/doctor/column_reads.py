# SPDX-License-Identifier: Apache-2.0
"""Find the columns of a table of Hugging Face `datasets` that a program does not read.

Such a dataset decodes all columns of a sample, whichever are used. The first samples of each
process and the first batches are dicts that note which of their values are taken. A column is
unread if no code took it from a sample, or all were collated and the program took it from no batch.
Code that takes all values of a dict at once counts as a reader of all columns.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.compat.modules import Patch
from penstock.doctor.program_runs import ColumnUse
from penstock.worker.reachable import reachable

_SAMPLES_MAX = 64  # in each process
_BATCHES_MAX = 8
_IN_SAMPLES, _IN_BATCHES = 0, 1
_ATTRIBUTE = "_penstock_column_reads"  # of a dataset


class ColumnReads:
    """The columns that were taken so far, by any process. A forked process notes its own in the
    same file."""

    def __init__(self, table: Any, folder: Path) -> None:
        self.names = tuple(table.column_names)
        self._places = {name: place for place, name in enumerate(self.names)}
        row_count = max(1, table.data.num_rows)
        columns = [table.data.column(name) for name in self.names]
        self._sample_bytes = tuple(column.nbytes / row_count for column in columns)
        path = folder / "columns"
        path.write_bytes(bytes(2 * len(self.names)))
        with path.open("r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)  # shared with forked processes
        self._process_id = os.getpid()
        self._samples_left = _SAMPLES_MAX
        self._batches_left = _BATCHES_MAX
        self._is_inside = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of the dataset is not watched

    @staticmethod
    def watch(dataset: Any, folder: Path) -> ColumnReads | None:
        """Watch the only table that a dataset consists of or has in its attributes; None if there
        is none, there are several, or its samples are made by a transform of the program."""
        kind = _table_class()
        if kind is None:
            return None
        tables = list(reachable(dataset, kind))
        if len(tables) != 1 or tables[0].format["type"] == "custom" or not tables[0].column_names:
            return None
        reads = ColumnReads(tables[0], folder)
        setattr(tables[0], _ATTRIBUTE, reads)
        return reads

    def sample(self, row: Any) -> Any:
        """Return a sample that notes which of its columns are taken."""
        if self._process_id != os.getpid():
            self._process_id, self._samples_left = os.getpid(), _SAMPLES_MAX
        if self._samples_left == 0 or type(row) is not dict:
            return row
        self._samples_left -= 1
        return _NotingDict(row, functools.partial(self._note, _IN_SAMPLES))

    def batch(self, batch: Any) -> Any:
        """Return a batch that does so, if it is a dict of columns."""
        is_of_columns = type(batch) is dict and batch.keys() <= self._places.keys()
        if self._batches_left == 0 or not is_of_columns:
            return batch
        self._batches_left -= 1
        return _NotingDict(batch, functools.partial(self._note, _IN_BATCHES))

    def use(self) -> ColumnUse | None:
        """Return which columns are unread; None if nothing was taken from samples or batches."""
        in_samples, in_batches = self._taken(_IN_SAMPLES), self._taken(_IN_BATCHES)
        taken = in_batches if in_batches else in_samples
        if not in_samples or not taken:
            return None
        unread = tuple(name for name in self.names if name not in taken & in_samples)
        return ColumnUse(self.names, self._sample_bytes, unread)

    def _taken(self, where: int) -> set[str]:
        return {name for name, place in self._places.items() if self._marks[2 * place + where]}

    def _note(self, where: int, name: Any) -> None:
        place = self._places.get(name)
        if place is not None:
            self._marks[2 * place + where] = 1


def _nothing() -> None:
    return None


class _NotingDict(dict[Any, Any]):
    """A dict that reports the keys of values that are taken."""

    def __init__(self, values: dict[Any, Any], note: Callable[[Any], None] | None = None) -> None:
        super().__init__(values)
        self._note = note

    def _note_key(self, key: Any) -> None:
        if self._note is not None:
            self._note(key)

    def _noted(self) -> dict[Any, Any]:
        for key in super().keys():
            self._note_key(key)
        return dict(super().items())

    def __getitem__(self, key: Any) -> Any:
        self._note_key(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note_key(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._note_key(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._note_key(key)
        return super().setdefault(key, default)

    def popitem(self) -> tuple[Any, Any]:
        self._noted()
        return super().popitem()

    def __iter__(self) -> Iterator[Any]:  # without it, dict(self) would not call __getitem__()
        return super().__iter__()

    def values(self) -> Any:
        return self._noted().values()

    def items(self) -> Any:
        return self._noted().items()

    def copy(self) -> dict[Any, Any]:
        return self._noted()

    def __copy__(self) -> dict[Any, Any]:
        return self._noted()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self._noted(),)

    def __or__(self, other: Any) -> Any:
        return self._noted() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._noted()

    def __eq__(self, other: object) -> bool:
        return self._noted() == other

    __hash__ = None


def _table_class() -> type | None:
    """Return the class of Hugging Face's map-style datasets, if the program has imported it."""
    module = sys.modules.get("datasets")
    found = getattr(module, "Dataset", None)
    return found if isinstance(found, type) and hasattr(found, "__getitems__") else None


class TableWatch:
    """A context in which tables report the columns that are taken from their samples."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def begin(self) -> None:
        """Call once the program may have imported `datasets`."""
        kind = _table_class()
        if kind is None or self._patches:
            return
        self._patches = [
            Patch(kind, "__getitem__", _watched_item),
            Patch(kind, "__getitems__", _watched_items),
        ]

    def end(self) -> None:
        for patch in self._patches:
            patch.undo()
        self._patches = []


def _watched_item(call: Any) -> Any:
    @functools.wraps(call)
    def item(self: Any, key: Any) -> Any:
        row = call(self, key)
        reads: ColumnReads | None = vars(self).get(_ATTRIBUTE)
        return row if reads is None or reads._is_inside else reads.sample(row)

    return item


def _watched_items(call: Any) -> Any:
    @functools.wraps(call)
    def items(self: Any, keys: Any) -> Any:
        reads: ColumnReads | None = vars(self).get(_ATTRIBUTE)
        if reads is None:
            return call(self, keys)
        reads._is_inside = True  # it takes all columns of a batch
        try:
            rows = call(self, keys)
        finally:
            reads._is_inside = False
        return [reads.sample(row) for row in rows]

    return items
