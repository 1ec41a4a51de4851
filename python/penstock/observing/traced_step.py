# SPDX-License-Identifier: Apache-2.0
"""The steps of a window, as a trace has them."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from penstock.loader.watched_steps import WatchedStep


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step, with the names of its tracks. ``place`` is its number in the window, ``prefix`` what
    the tracks of its loader begin with, and ``thread_suffix`` tells the trainer's threads apart."""

    seen: WatchedStep
    place: int
    loader_name: str
    prefix: str
    thread_id: int
    thread_suffix: str


class StepWindow:
    """Notes ``step_count`` batches after the first ``skip_count``, and the calls between them that
    ended an epoch. Thread-safe."""

    def __init__(self, step_count: int, skip_count: int) -> None:
        self._lock = threading.Lock()
        self._step_count = step_count
        self._left_out = skip_count
        self._noted: list[tuple[WatchedStep, int, int]] = []  # with the loader and the thread
        self._batch_count = 0
        self._loaders: list[tuple[weakref.ref[Any], str]] = []
        self._threads: list[int] = []

    def note(self, step: WatchedStep) -> bool:
        """Whether the window is full. Of a step that is left out, batches that wait are dropped."""
        with self._lock:
            if self._left_out > 0:
                self._left_out -= step.has_batch
                return False
            if self._batch_count >= self._step_count:
                return True
            thread_id = threading.get_ident()
            if thread_id not in self._threads:
                self._threads.append(thread_id)
            self._noted.append((step, self._loader_number(step.loader), thread_id))
            self._batch_count += step.has_batch
            return self._batch_count >= self._step_count

    @property
    def batch_count(self) -> int:
        return self._batch_count

    def steps(self) -> list[TracedStep]:
        """In the order in which they ended."""
        with self._lock:
            several = len(self._loaders) > 1
            names = [
                f"loader {number} ({kind})" for number, (_, kind) in enumerate(self._loaders, 1)
            ]
            return [
                TracedStep(
                    step,
                    place,
                    names[loader],
                    f"{names[loader]}: " if several else "",
                    thread_id,
                    f" {self._threads.index(thread_id) + 1}" if len(self._threads) > 1 else "",
                )
                for place, (step, loader, thread_id) in enumerate(self._noted)
            ]

    def _loader_number(self, loader: weakref.ref[Any]) -> int:
        for number, (known, _) in enumerate(self._loaders):
            if known == loader:
                return number
        live = loader()
        kind = "gone" if live is None else type(live.dataset).__name__
        self._loaders.append((loader, kind))
        return len(self._loaders) - 1
