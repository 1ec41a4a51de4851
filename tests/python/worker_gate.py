# SPDX-License-Identifier: Apache-2.0
"""A gate that blocks a worker until its trainer waits for it.

It makes the cause of a trainer's wait certain on machines of any speed, without sleeps and without
assertions on durations.
"""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

SECONDS_MAX = 60.0


class WorkerGate:
    """Two pipes, shared by forked workers and the trainer. One worker passes, once."""

    def __init__(self) -> None:
        self._pipes = [os.pipe(), os.pipe()]

    def pass_through(self) -> None:
        """Wait until the gate is opened. Called by the worker."""
        (_, here), (opened, _) = self._pipes
        os.write(here, b"!")
        os.read(opened, 1)

    def close(self) -> None:
        for end in itertools.chain(*self._pipes):
            os.close(end)

    @contextmanager
    def opened_once_waiting(self, loader: Any, *, given: int, ready: int = 0) -> Iterator[None]:
        """Open once a worker is at the gate, at least `given` batches were delivered, `ready`
        others have arrived, and the trainer has then checked twice for Ctrl-C, which it does during
        long waits. So it has waited for this worker's batch during the whole time between the two
        checks, and still does. If that does not happen, open and fail."""
        with ThreadPoolExecutor(1) as opener:
            opened = opener.submit(self._open, loader, given, ready)
            yield
        opened.result()

    def _open(self, loader: Any, given: int, ready: int) -> None:
        (is_here, _), (_, open_it) = self._pipes
        try:
            assert select.select([is_here], [], [], SECONDS_MAX)[0], "no worker is at the gate"
            wait_until(lambda: loader.stats().batches >= given and loader.stats().ready >= ready)
            waits = loader.stats().waits
            wait_until(lambda: loader.stats().waits >= waits + 2)
        finally:
            os.write(open_it, b"!")


def wait_until_ready(loader: Any, count: int) -> None:
    """Wait until `count` batches have arrived, so that the program need not wait for any of
    them."""
    wait_until(lambda: loader.stats().ready == count)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
