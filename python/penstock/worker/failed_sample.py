# SPDX-License-Identifier: Apache-2.0
"""Which sample of a map-style dataset an exception came out of.

The traceback says in which line the dataset failed, and not for which index. The index is a
variable of a frame that the exception went through: the exception itself is the user's and is not
written to, since its class may refuse that.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from penstock.seams.iterators import MapDatasetFetcher

_FIRST_LINE = "Traceback (most recent call last):\n"
_INDEX = "failed_index"  # the variable of a frame of this package that has the index
_PACKAGE = "penstock."


class NamingMapFetcher(MapDatasetFetcher):
    """Torch's fetcher of map-style datasets, whose exceptions know their sample.

    A batch of indices that is no list has no names. Confined to one thread.
    """

    def fetch(self, possibly_batched_index: Any) -> Any:
        if not self.auto_collation or type(possibly_batched_index) is not list:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        indices = _WalkedList(possibly_batched_index)
        try:
            return super().fetch(indices)  # type: ignore[no-untyped-call]
        except Exception:
            if (place := indices.next_place()) > 0:
                failed_index = indices[place - 1]  # noqa: F841 - for spoken_sample()
            raise


class _WalkedList(list[Any]):
    """Knows how far it was iterated, which costs nothing while it is."""

    _iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._iterator = super().__iter__()
        return self._iterator

    def next_place(self) -> int:
        """Of the item that is given next; 0 before the first, and once the end was met."""
        # As copy.copy() asks it: (iter, (list,), place), without a place once the end was met.
        parts: Any = () if self._iterator is None else self._iterator.__reduce__()
        return parts[2] if len(parts) == 3 else 0


def spoken_sample(error: BaseException) -> str:
    """ "sample 12 of the dataset" for the index that the dataset was asked for.

    "" where the batch as a whole failed, in ``__getitems__`` or ``collate_fn``.
    """
    variables = _variables_with_index(error.__traceback__)
    return f"sample {variables[_INDEX]!r} of the dataset" if _INDEX in variables else ""


def _variables_with_index(traceback: TracebackType | None) -> dict[str, Any]:
    """Of the outermost frame that may have the index: an exception that is raised again has the
    frames of before below those of now."""
    while traceback is not None:
        frame = traceback.tb_frame
        is_own = str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
        if is_own and _INDEX in frame.f_code.co_varnames:
            return frame.f_locals
        traceback = traceback.tb_next
    return {}


def name_sample(text: str, sample: str) -> str:
    """The text of a traceback with the sample below its first line; its last lines are torch's."""
    if not sample or not text.startswith(_FIRST_LINE):
        return text
    return f"{_FIRST_LINE}  ({sample})\n{text[len(_FIRST_LINE) :]}"
