# SPDX-License-Identifier: Apache-2.0
"""How much shared memory one worker may take for its batches."""

from __future__ import annotations

import os

_DEFAULT_ARENA_BYTES = 256 << 20


def arena_bytes() -> int:
    """The cap of one worker's arena, from PENSTOCK_ARENA_BYTES.

    Raises ValueError when that is not a positive integer.
    """
    text = os.environ.get("PENSTOCK_ARENA_BYTES")
    if text is None:
        return _DEFAULT_ARENA_BYTES
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"PENSTOCK_ARENA_BYTES is {text!r}; a positive number of bytes is expected, such as "
            f"{_DEFAULT_ARENA_BYTES}"
        )
    return int(text)
