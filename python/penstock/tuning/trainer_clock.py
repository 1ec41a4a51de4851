# SPDX-License-Identifier: Apache-2.0
"""Seconds of the training thread's work, on the device that does it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PENDING_MAX = 256  # stretches that a device has not come to the end of; others are not measured


class TrainerClock:
    """Times stretches between ``begin`` and ``end``. Confined to the training thread.

    With a GPU, or another accelerator, these are events on the stream that is current there: the
    time between them is the device's time for the work that was given to it in between. Nothing
    waits for the device, so a stretch is known some time after it ended. Elsewhere, and on a device
    whose events have no times, it is the host's clock.
    """

    def __init__(
        self, device: torch.device | None, make_event: Callable[[], Any] | None = None
    ) -> None:
        self._device = device
        if make_event is None and device is not None and device.type != "cpu":
            make_event = self._device_event
        self._make_event = make_event
        self._open: tuple[Any, Any] | None = None
        self._pending: deque[tuple[Any, Any, Any]] = deque()
        self._done: list[tuple[Any, float]] = []

    @property
    def is_of_device(self) -> bool:
        """Whether it is another clock than the host's."""
        return self._make_event is not None

    def begin(self, label: Hashable) -> None:
        """A stretch that is still open is given up."""
        self._open = (label, self._now()) if len(self._pending) < _PENDING_MAX else None

    def end(self) -> None:
        if self._open is None:
            return
        label, began = self._open
        self._open = None
        if self._make_event is None:
            self._done.append((label, time.perf_counter() - began))
        else:
            self._pending.append((label, began, self._now()))

    def take(self) -> list[tuple[Any, float]]:
        """The stretches that are known and were not taken before, in order."""
        while self._pending and self._pending[0][2].query():
            label, began, ended = self._pending.popleft()
            try:
                milliseconds = began.elapsed_time(ended)
            except RuntimeError:
                logger.debug("the events of %s have no times", self._device, exc_info=True)
                self._make_event = None
                self._open = None
                self._pending.clear()
                break
            self._done.append((label, milliseconds * 1e-3))
        done, self._done = self._done, []
        return done

    def _now(self) -> Any:
        if self._make_event is None:
            return time.perf_counter()
        event = self._make_event()
        if self._device is None:
            event.record()
        else:
            event.record(torch.accelerator.current_stream(self._device))
        return event

    def _device_event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)
