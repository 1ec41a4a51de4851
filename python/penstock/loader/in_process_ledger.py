# SPDX-License-Identifier: Apache-2.0
"""Where the time of the steps goes with ``num_workers=0``: csrc/loader/step_ledger.h has the parts.

The program's thread makes the batches, so that a wait is for what it then does.
"""

from __future__ import annotations

import time
from collections import Counter

from penstock import _C
from penstock.loader.past_work import PastWork
from penstock.loader.step_times import SlowSample


class InProcessLedger:
    """Of one iterator. Confined to the program's thread.

    Adds to the counters of the loader, by the names that a stream's have. ``clock`` is that of the
    batch in the making.
    """

    def __init__(self, counters: Counter[str], work: PastWork) -> None:
        self.clock = _C.FetchClock()
        self._counters: dict[str, float] = counters  # type: ignore[assignment]
        self._work = work
        self._left_at = time.perf_counter()
        self._entered_at: float | None = None
        self._placed_s = 0.0  # of this call, what is in its place
        self._fetch_at = 0.0

    # ---- The program's calls

    def begin(self, loading_s: float) -> None:
        """The first step begins, after ``loading_s`` in which the iterator was made."""
        self._left_at = time.perf_counter()
        self._add("step_loader_s", loading_s)

    def enter(self) -> None:
        now = time.perf_counter()
        self._add("step_compute_s", now - self._left_at)
        self._entered_at = now
        self._placed_s = 0.0

    def leave(self, has_batch: bool) -> None:
        assert self._entered_at is not None
        self._left_at = time.perf_counter()
        self._add("step_loader_s", self._left_at - self._entered_at - self._placed_s)
        self._entered_at = None
        if has_batch:
            self._counters["steps"] += 1

    # ---- Batches

    def begin_batch(self) -> None:
        self._fetch_at = time.perf_counter()
        self.clock.begin()

    def end_batch(self, sequence: int, indices: object) -> None:
        """``indices`` are those that the batch was asked for by."""
        spent_s = time.perf_counter() - self._fetch_at
        dataset_s, slowest_s, place = self.clock.times()
        dataset_s = min(dataset_s, spent_s)
        self._place("step_dataset_s", dataset_s)
        self._place("step_collate_s", spent_s - dataset_s)
        if not self._work.is_slow(slowest_s if slowest_s > 0 else dataset_s):
            return
        if slowest_s > 0:
            index = _index_at(indices, place)
            self._work.note_sample(SlowSample(slowest_s, index, sequence, place, 0))
        else:
            self._work.note_sample(SlowSample(dataset_s, None, sequence, None, 0))

    def note(self, part: str, seconds: float) -> None:
        """Time of this call that went to ``part``, beside what :meth:`end_batch` placed."""
        self._place(f"step_{part}", seconds)

    @property
    def placed_s(self) -> float:
        """The seconds of this call that are in their place."""
        return self._placed_s

    def _place(self, name: str, seconds: float) -> None:
        self._placed_s += seconds
        self._add(name, seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._counters[name] += seconds


def _index_at(indices: object, place: int) -> int | None:
    found = indices[place] if isinstance(indices, list) and place < len(indices) else indices
    return found if isinstance(found, int) else None
