# SPDX-License-Identifier: Apache-2.0
"""Asks a controller for its status again and again, in a thread of its own, as an operator does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock import _pool
from penstock.errors import PenstockError
from penstock.live.pool_view import PoolView, pool_view


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where a controller is, and with which keys and patience it is asked."""

    endpoint: str
    keys: str | None
    timeout_s: float


def ask_pool(address: PoolAddress) -> PoolView:
    """Blocks until the controller answers. Raises PenstockError, ValueError or OSError."""
    text = _pool.pool_status(address.endpoint, address.keys, address.timeout_s)
    fields: dict[str, Any] = json.loads(text)
    return pool_view(fields, time.time())


class StatusPoller:
    """Calls ``take`` with each status, and ``fail`` with a sentence where there was none, both in
    its own thread. At most one request is under way."""

    def __init__(
        self,
        address: PoolAddress,
        interval_s: float,
        take: Callable[[PoolView], None],
        fail: Callable[[str], None],
    ) -> None:
        self._address = address
        self._interval_s = interval_s
        self._take = take
        self._fail = fail
        self._news = threading.Condition()
        self._is_closed = False
        self._is_hurried = False
        self._thread = threading.Thread(target=self._run, name="penstock-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Asks at once."""
        with self._news:
            self._is_hurried = True
            self._news.notify_all()

    def close(self) -> None:
        """Ends the thread; waits for the request that is under way, which has a time limit."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            try:
                view = ask_pool(self._address)
            except (PenstockError, ValueError, OSError) as error:
                self._fail(str(error))
            else:
                self._take(view)
            with self._news:
                left = began + self._interval_s - time.monotonic()
                if left > 0:
                    self._news.wait_for(lambda: self._is_closed or self._is_hurried, left)
                self._is_hurried = False
