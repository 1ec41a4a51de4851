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

from penstock.compat.iterators import MapDatasetFetcher

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
        # Torch walks through it alone, unless the dataset is given whole lists, as a Subset is.
        is_given_on = hasattr(self.dataset, "__getitems__")
        indices: Any = possibly_batched_index
        walked: Any = _WalkedList(indices) if is_given_on else iter(indices)
        try:
            return super().fetch(walked)  # type: ignore[no-untyped-call]
        except BaseException:
            if (place := _next_place(walked.walk if is_given_on else walked)) > 0:
                failed_index = indices[place - 1]  # noqa: F841 - for spoken_sample()
            raise


class _WalkedList(list[Any]):
    """Has the iterator that it was walked through by last."""

    walk: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.walk = super().__iter__()
        return self.walk


def _next_place(walk: Iterator[Any] | None) -> int:
    """The place of the item that a list's iterator gives next; 0 before the first, and once the end
    was met."""
    # As copy.copy() asks it: (iter, (list,), place), without a place once the end was met.
    parts: Any = () if walk is None else walk.__reduce__()
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
