# SPDX-License-Identifier: Apache-2.0
"""Decide on how many threads the samples of a batch are fetched: ``fetch_threads="auto"``."""

from __future__ import annotations

_TRIED = 3  # batches on one thread for a decision
_TRIED_ON_THREADS = 8  # batches: samples of which few wait need more of them
_TRIED_S = 1.0  # or the time of fewer that suffices
_WAITING_MIN = 0.3  # of the time of the samples; below it, threads compete for the interpreter
_WAITING_MIN_S = 0.001  # in a batch; below it, waking threads takes as long
_GAIN_MIN = 1.1  # of the rate, for more threads than before
_MEASURED_EVERY = 16  # batches, once the number is chosen
_UNTRIED = 256  # measured batches that mostly wait, after more threads did not help


class ThreadChoice:
    """The number of threads for the next batch, decided from times that the caller measures.

    One thread first. If the samples mostly wait, as many threads as keep one CPU busy are tried,
    then twice as many, as long as samples come faster. If they no longer wait, as when the page
    cache has become warm, one thread fetches again.

    Rates are means over several batches, since few samples of a batch may wait: threads fetch
    later batches meanwhile, and most batches take no time at all.
    """

    def __init__(self, most: int) -> None:
        """``most`` is the upper limit."""
        self.most = most
        self.threads = 1
        self.is_allowed = True
        self._chosen = 1  # the best number so far
        self._is_trying = False  # another number
        self._has_chosen = False
        self._batches = self._samples = 0  # noted on the present number of threads
        self._spent_s = self._busy_s = self._waited_s = 0.0
        self._best_s = 0.0  # for a sample, on the chosen number
        self._unmeasured = 1  # the first batch imports modules and opens files
        self._untried = 0

    def forbid(self) -> None:
        """Stay at one thread."""
        self.threads, self.is_allowed = 1, False

    def is_measured(self) -> bool:
        """Return whether the next batch is to be measured, and reported by :meth:`note`: each one
        on several threads, since those of later batches are fetched at the same time."""
        if not self.is_allowed:
            return False
        if self.threads > 1:
            return True
        self._unmeasured -= 1
        return self._unmeasured < 0

    def note(self, sample_count: int, spent_s: float, busy_s: float, waited_s: float) -> None:
        """Note a batch that was fetched on :attr:`threads`.

        Args:
            sample_count (int): Its samples, 1 or more.
            spent_s (float): Seconds that the trainer's batch took, 0 if it was fetched ahead.
            busy_s (float): Seconds since the previous batch in which samples were fetched, of this
                batch or of later ones; on one thread ``spent_s``.
            waited_s (float): Of these, seconds in which none of the threads ran or waited for a
                CPU; with several threads, ``busy_s`` without the CPU time of all, at least 0.
        """
        self._batches += 1
        self._samples += sample_count
        self._spent_s += spent_s
        self._busy_s += busy_s
        self._waited_s += waited_s
        if self.threads == 1:
            self._unmeasured = _MEASURED_EVERY - 1 if self._has_chosen else 0
        if self._has_enough():
            self._decide(self._spent_s / self._samples)
            self._batches = self._samples = 0
            self._spent_s = self._busy_s = self._waited_s = 0.0

    def _has_enough(self) -> bool:
        if self.threads > 1 and not self._is_trying:
            return self._batches >= _MEASURED_EVERY
        enough = _TRIED_ON_THREADS if self._is_trying else _TRIED
        return self._batches >= enough or self._busy_s >= _TRIED_S

    def _decide(self, now_s: float) -> None:
        waits = self._waited_s >= max(_WAITING_MIN * self._busy_s, _WAITING_MIN_S * self._batches)
        if self._is_trying:
            self._is_trying = False
            if now_s * _GAIN_MIN <= self._best_s:
                self._best_s, self._chosen = now_s, self.threads
                self._try(2 * self.threads)
            else:
                self._choose(self._chosen)
                self._untried = _UNTRIED
        elif self.threads > 1:
            self._choose(self.threads if waits else 1)
        elif waits and self._untried == 0:
            self._best_s, self._chosen = now_s, 1
            runs_s = max(self._busy_s - self._waited_s, self._busy_s / self.most)
            self._try(round(self._busy_s / runs_s))
        else:
            self._untried = max(0, self._untried - _TRIED)
            self._choose(1)

    def _try(self, count: int) -> None:
        count = min(max(2, count), self.most)
        if count <= self._chosen:
            self._choose(self._chosen)
            return
        self.threads, self._is_trying, self._has_chosen = count, True, False

    def _choose(self, count: int) -> None:
        self.threads = self._chosen = count
        self._has_chosen = True
        self._unmeasured = _MEASURED_EVERY - 1
