# SPDX-License-Identifier: Apache-2.0
"""A gate at which a worker stands until its trainer waits for it.

So a test knows what the trainer has waited for, however fast the machine is: no duration is slept
for, and none is asserted.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS_MAX = 60.0


class AwaitedGate:
    """Two pipes, which forked workers share with the trainer. One worker passes, once."""

    def __init__(self) -> None:
        self._pipes = [os.pipe(), os.pipe()]

    def pass_through(self) -> None:
        """Called by the worker; waits until the gate is opened."""
        (_, here), (opened, _) = self._pipes
        os.write(here, b"!")
        os.read(opened, 1)

    def close(self) -> None:
        for end in itertools.chain(*self._pipes):
            os.close(end)

    @contextmanager
    def opened_when_awaited(self, loader: Any, *, given: int, ready: int = 0) -> Iterator[None]:
        """Opens once a worker is here, `given` batches were given out and `ready` others are here,
        and the trainer has looked for Ctrl-C twice since, which it does when it has waited long. So
        it has waited for this worker's batch all the time between the two looks, and still does."""
        opener = threading.Thread(target=self._open, args=(loader, given, ready))
        opener.start()
        try:
            yield
        finally:
            opener.join()

    def _open(self, loader: Any, given: int, ready: int) -> None:
        (is_here, _), (_, open_it) = self._pipes
        try:
            select.select([is_here], [], [], SECONDS_MAX)
            wait_until(lambda: loader.stats().batches == given and loader.stats().ready >= ready)
            waits = loader.stats().waits
            wait_until(lambda: loader.stats().waits >= waits + 2)
        finally:
            os.write(open_it, b"!")


def wait_until_ready(loader: Any, count: int) -> None:
    """Waits until so many batches are here, so that the program has none of them to wait for."""
    wait_until(lambda: loader.stats().ready == count)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
