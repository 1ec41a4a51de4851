# SPDX-License-Identifier: Apache-2.0
"""How much memory one worker may take: for its batches, and for the job that makes them."""

from __future__ import annotations

import os

_DEFAULT_ARENA_BYTES = 256 << 20
_DEFAULT_JOB_BYTES = 64 << 30


def arena_bytes() -> int:
    """The cap of one worker's arena, from PENSTOCK_ARENA_BYTES.

    Raises ValueError when that is not a positive integer.
    """
    return _bytes_of("PENSTOCK_ARENA_BYTES", _DEFAULT_ARENA_BYTES)


def job_bytes() -> int:
    """The cap of a single object that a pool's worker takes from a trainer: a dataset, or a folder
    of modules; from PENSTOCK_JOB_BYTES.

    Raises ValueError when that is not a positive integer.
    """
    return _bytes_of("PENSTOCK_JOB_BYTES", _DEFAULT_JOB_BYTES)


def _bytes_of(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"{variable} is {text!r}; a positive number of bytes is expected, such as {default}"
        )
    return int(text)
