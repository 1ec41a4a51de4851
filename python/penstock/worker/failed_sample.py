# SPDX-License-Identifier: Apache-2.0
"""Find the sample of a map-style dataset that raised an exception.

The traceback shows the failing line of the dataset, but not the index. The index is in a variable
of a frame that the exception has passed through: the exception itself is not modified, since it
belongs to the user and its class may not permit that.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from penstock.compat.iterators import MapDatasetFetcher

_FIRST_LINE = "Traceback (most recent call last):\n"
_INDEX = "failed_index"  # the variable with the index, in a frame of this package
_PACKAGE = "penstock."


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
        walked: Any = _WalkedList(indices) if is_given_on else iter(indices)
        try:
            return super().fetch(walked)  # type: ignore[no-untyped-call]
        except BaseException:
            if (place := _next_place(walked.walk if is_given_on else walked)) > 0:
                failed_index = indices[place - 1]  # noqa: F841 - for spoken_sample()
            raise


class _WalkedList(list[Any]):
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


def spoken_sample(error: BaseException) -> str:
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
