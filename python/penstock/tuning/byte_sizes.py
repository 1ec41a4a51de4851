# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes as people write them, in arguments and in options of commands."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)
_BYTES_MAX = 1 << 60


def parse_bytes(text: str) -> int | None:
    """Parse a size such as ``1048576``, ``200GB``, ``1.5 MiB`` or ``64g``.

    Returns:
        int | None: Number of bytes, below 2**60; None if ``text`` is not a size or not a whole
        number of bytes.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit, is_binary = found.groups()
    base = 1024 if is_binary else 1000
    count = Decimal(number) * base ** ("kmgt".index(unit.lower()) + 1 if unit else 0)
    return int(count) if count == int(count) and count < _BYTES_MAX else None


def checked_bytes(name: str, size: Any) -> int:
    """Return the number of bytes that an argument ``name`` states, as an int or a text.

    Raises:
        ValueError: If it is neither, or not above 0.
    """
    if isinstance(size, str):
        count = parse_bytes(size) or 0
    else:
        count = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if count <= 0:
        raise ValueError(
            f'{name} must be a number of bytes > 0 or a text such as "2GB" or "512MiB", got '
            f"{size!r}; pass the bytes that samples may take"
        )
    return count
