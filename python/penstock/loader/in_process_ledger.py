# SPDX-License-Identifier: Apache-2.0
"""Where the time of the steps goes with ``num_workers=0``: csrc/loader/step_ledger.h has the parts.

The program's thread makes the batches, so that a wait is for what it then does.
"""

from __future__ import annotations

import time
from collections import Counter

from penstock.loader.past_work import PastWork
from penstock.loader.step_times import SlowSample


class InProcessLedger:
    """Of one iterator, and the clock of its batches. Confined to the program's thread.

    Adds to the counters of the loader as a stream's are named.
    """

    def __init__(self, counters: Counter[str], work: PastWork) -> None:
        self._counters: dict[str, float] = counters  # type: ignore[assignment]
        self._work = work
        self._left_at = time.perf_counter()
        self._entered_at: float | None = None
        self._placed_s = 0.0  # of this call, what is in its place
        self._fetch_at: float | None = None
        self._collate_at: float | None = None
        self._sample_count = 0
        self._slowest: tuple[int, int] = (0, 0)  # nanoseconds and place

    # ---- The clock of a batch

    def begin_collate(self) -> None:
        if self._collate_at is None:
            self._collate_at = time.perf_counter()

    def note_sample(self, time_ns: int) -> None:
        if time_ns > self._slowest[0]:
            self._slowest = (time_ns, self._sample_count)
        self._sample_count += 1

    # ---- The program's calls

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

    def begin(self, loading_s: float) -> None:
        """The first step begins, after ``loading_s`` in which the iterator was made."""
        self._left_at = time.perf_counter()
        self._add("step_loader_s", loading_s)

    def begin_batch(self) -> None:
        self._fetch_at = time.perf_counter()
        self._collate_at = None
        self._sample_count = 0
        self._slowest = (0, 0)

    def end_batch(self, sequence: int, indices: object) -> None:
        """``indices`` are those that the batch was asked for by."""
        assert self._fetch_at is not None
        now = time.perf_counter()
        collate_at = now if self._collate_at is None else self._collate_at
        self._place("step_dataset_s", collate_at - self._fetch_at)
        self._place("step_collate_s", now - collate_at)
        time_ns, place = self._slowest
        if time_ns > 0:
            index = _index_at(indices, place)
            self._work.note_sample(SlowSample(time_ns / 1e9, index, sequence, place, 0))
        else:
            whole_s = collate_at - self._fetch_at
            self._work.note_sample(SlowSample(whole_s, None, sequence, None, 0))

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
