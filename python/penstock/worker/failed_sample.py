# SPDX-License-Identifier: Apache-2.0
"""Which sample of a map-style dataset an exception came out of.

The traceback says in which line the dataset failed, and not for which index: torch's fetcher has
that in a local variable.
"""

from __future__ import annotations

import traceback
from typing import Any

from torch.utils.data import dataset as torch_dataset

from penstock.seams.iterators import FETCH_FILE

_FILES = (FETCH_FILE, torch_dataset.__file__)
_FUNCTIONS = ("fetch", "<listcomp>", "__getitems__")
_FIRST_LINE = "Traceback (most recent call last):\n"


def keep_index(error: BaseException, index: Any) -> None:
    """Notes that ``error`` was raised for the sample at ``index``, for :func:`spoken_sample`."""
    error._penstock_index = index  # type: ignore[attr-defined]


def spoken_sample(error: BaseException) -> str:
    """ "sample 12 of the dataset" for the index that the dataset was asked for.

    "" where the batch as a whole failed, in ``__getitems__`` or ``collate_fn``.
    """
    if hasattr(error, "_penstock_index"):
        return f"sample {error._penstock_index!r} of the dataset"
    spoken = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        is_fetcher = frame.f_code.co_filename in _FILES and frame.f_code.co_name in _FUNCTIONS
        if is_fetcher and "idx" in frame.f_locals:
            spoken = f"sample {frame.f_locals['idx']!r} of the dataset"
    return spoken


def name_sample(text: str, sample: str) -> str:
    """The text of a traceback with the sample below its first line; its last lines are torch's."""
    if not sample or not text.startswith(_FIRST_LINE):
        return text
    return f"{_FIRST_LINE}  ({sample})\n{text[len(_FIRST_LINE) :]}"
