# SPDX-License-Identifier: Apache-2.0
"""The beginning of an HTTP request, of which a server reads a bounded number of bytes."""

from __future__ import annotations

from typing import Any

HEAD_BYTES_MAX = 16 << 10


class RequestHead:
    """Stands for the stream of a connection where the standard library reads lines. Where there are
    more than HEAD_BYTES_MAX in all, it ends the head and sets ``is_too_long``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = HEAD_BYTES_MAX
        self.is_too_long = False

    def readline(self, limit: int = -1) -> bytes:
        if self.is_too_long:
            return b"\r\n"
        line: bytes = self._stream.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        self.is_too_long = self._left == 0 and not line.endswith(b"\n")
        return line

    def close(self) -> None:
        self._stream.close()

    @property
    def closed(self) -> bool:
        closed: bool = self._stream.closed
        return closed
