# SPDX-License-Identifier: Apache-2.0
"""Memory limits of one worker: for its batches, and for the job that makes them."""

from __future__ import annotations

import os

_DEFAULT_ARENA_BYTES = 256 << 20
_DEFAULT_JOB_BYTES = 64 << 30


def arena_bytes() -> int:
    """Return the limit of one worker's arena, from PENSTOCK_ARENA_BYTES.

    Raise ValueError if it is not a positive integer.
    """
    return _bytes_of("PENSTOCK_ARENA_BYTES", _DEFAULT_ARENA_BYTES)


def job_bytes() -> int:
    """Return the limit of a single object that a pool worker accepts from a trainer, such as a
    dataset or a folder of modules, from PENSTOCK_JOB_BYTES.

    Raise ValueError if it is not a positive integer.
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
