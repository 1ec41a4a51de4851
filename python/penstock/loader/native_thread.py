# SPDX-License-Identifier: Apache-2.0
"""The native thread of a pool, for those who look for the Python thread that torch has there."""

from __future__ import annotations

import threading


class NativeThread:
    """The face of the thread that receives, and pins, the batches of one pool."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)
