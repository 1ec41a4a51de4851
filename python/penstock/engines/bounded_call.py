# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine that may hang. One that takes too long is left to itself, and the adapter goes
on; until it returns the engine counts as one that does not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from penstock.engines.engine import EngineRefusal, EngineTrouble


class BoundedCalls:
    """For one thread. Calls run on a thread of their own, one after the other."""

    def __init__(self, title: str, limit_s: float) -> None:
        self._title = title
        self._limit_s = limit_s
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._hanging: str | None = None  # the call that has not returned
        threading.Thread(target=self._run, name="penstock engine", daemon=True).start()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._results.put((True, call()))
            except Exception as error:
                self._results.put((False, error))

    def __call__(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of ``call``, or its EngineRefusal. Raises EngineTrouble for any other
        exception, and after the limit."""
        if self._hanging is not None:
            try:  # the outcome of a call that nobody waited for
                self._results.get_nowait()
            except queue.Empty:
                raise self._trouble(self._hanging) from None
            self._hanging = None
        self._calls.put(call)
        try:
            has_returned, outcome = self._results.get(timeout=self._limit_s)
        except queue.Empty:
            self._hanging = what
            raise self._trouble(what) from None
        if has_returned:
            return outcome
        if isinstance(outcome, EngineRefusal | EngineTrouble):
            raise outcome
        raise EngineTrouble(
            f"the engine {self._title} failed at a call to {what}: "
            f"{type(outcome).__name__}: {outcome}"
        ) from outcome

    def _trouble(self, what: str) -> EngineTrouble:
        return EngineTrouble(
            f"the engine {self._title} has not answered a call to {what} within {self._limit_s:g} s"
        )
