# SPDX-License-Identifier: Apache-2.0
"""A gate at which a worker stands until its trainer waits for it.

So a test knows what the trainer has waited for, however fast the machine is: no duration is slept
for, and none is asserted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS_MAX = 60.0


class AwaitedGate:
    """A pipe, which forked workers share with the trainer. One `pass_through` for each opening."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def pass_through(self) -> None:
        """Called by a worker; waits until the gate is opened."""
        os.read(self._reader, 1)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    @contextmanager
    def opened_when_awaited(self, loader: Any, ready: int = 0) -> Iterator[None]:
        """Opens once `ready` batches are here that are not given out and, from then on, the
        trainer has waited twice as long as it does without looking for Ctrl-C: all of the second
        wait was after that moment, and the trainer is in the midst of the next one."""
        opener = threading.Thread(target=self._open, args=(loader, ready))
        opener.start()
        try:
            yield
        finally:
            opener.join()

    def _open(self, loader: Any, ready: int) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        try:
            while loader.stats().ready < ready and time.monotonic() < deadline:
                time.sleep(0.01)
            waits = loader.stats().waits
            while loader.stats().waits < waits + 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            os.write(self._writer, b"!")


def wait_until_ready(loader: Any, count: int) -> None:
    """Waits until so many batches are here, so that the program has none of them to wait for."""
    deadline = time.monotonic() + SECONDS_MAX
    while loader.stats().ready < count:
        assert time.monotonic() < deadline, loader.stats()
        time.sleep(0.01)
