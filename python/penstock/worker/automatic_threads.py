# SPDX-License-Identifier: Apache-2.0
"""Fetch the samples of a batch on as many threads as help: ``fetch_threads="auto"``.

Batches are the same as on one thread. Threads would share the random generators, so a batch during
whose fetch a global one moved is made again on one thread, with the generators as they were, and
this process uses one thread from then on. A dataset with a generator has one thread, too. While
samples of later batches are fetched ahead, a generator must not move between two batches either.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from penstock.compat.iterators import MapDatasetFetcher
from penstock.program_line import warn
from penstock.stream.batch_seeds import PlacedSamples, generator_states, have_moved, restore
from penstock.tuning.process_resources import thread_delay_s
from penstock.tuning.thread_choice import ThreadChoice
from penstock.worker.reachable import generators_in
from penstock.worker.threaded_fetch import FetchPool

_THREADS_MAX = 32


class AutomaticPool(FetchPool):
    """Threads of which a batch uses as many as help, for one dataset of this process."""

    def __init__(self) -> None:
        super().__init__(_THREADS_MAX)
        self.choice = ThreadChoice(_THREADS_MAX)
        self._searched: Any = None

    def search_generators(self, dataset: Any) -> None:
        """Use one thread if an attribute of ``dataset`` is a generator."""
        if self._searched is not dataset:
            self._searched = dataset
            if generators_in(dataset):
                self.forbid("it has a random generator in an attribute")

    def forbid(self, reason: str) -> None:
        """Use one thread from now on, with a warning."""
        self.choice.forbid()
        info = get_worker_info()
        if info is None or info.id == 0:
            warn(
                f"fetch_threads='auto' fetches samples of {type(self._searched).__name__} on "
                f"one thread, because {reason}, which threads would share; draw from the "
                f"torch.Generator that penstock passes to a dataset with "
                f"__getitem__(self, index, generator=None), with seeding='batch' or 'sample'"
            )


def make_pool(fetch_threads: int | str) -> FetchPool | None:
    """Return a pool for ``fetch_threads``; None if samples are always fetched serially."""
    if isinstance(fetch_threads, str):
        return AutomaticPool()
    return FetchPool(fetch_threads) if fetch_threads > 1 else None


class AutomaticMapFetcher(MapDatasetFetcher):
    """Fetches a batch with a serial fetcher, or on threads of ``pool``. Confined to one thread.

    ``make_serial`` makes that fetcher with a ``collate_fn``. ``placed`` is the part of ``dataset``
    that seeds generators.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        make_serial: Callable[[Callable[[Any], Any]], MapDatasetFetcher],
        pool: AutomaticPool,
        placed: PlacedSamples | None,
    ) -> None:
        super().__init__(dataset, True, collate_fn, drop_last)
        self._serial = make_serial(self._note_samples)
        self._pool, self._choice, self._placed = pool, pool.choice, placed
        self._began: tuple[int, float, float] | None = None  # samples, and clocks of a measurement
        self._expected: deque[list[Any]] = deque()  # batches that are not fetched ahead yet
        self._noted = pool.clock.read()  # of the pool, at the end of the previous batch
        # The states of the generators since samples are fetched ahead, if they have not moved.
        self._unmoved: tuple[Any, ...] | None = None

    def fetch(self, possibly_batched_index: Any) -> Any:
        choice = self._choice
        indices = possibly_batched_index
        if self._expected and self._expected[0] == list(indices):
            self._expected.popleft()
        is_on_threads = choice.threads > 1 and len(indices) > 1
        if is_on_threads or self._pool.is_next(self.dataset, list(indices)):
            return self._fetch_on_threads(list(indices))
        if self._unmoved is not None:
            self._drop_ahead(self._unmoved)
        self._began = None
        if choice.threads == 1 and len(indices) > 0 and choice.is_measured():
            self._began = len(indices), time.perf_counter(), _not_waiting_s()
        return self._serial.fetch(indices)

    def expect(self, indices: Any) -> None:
        """Announce a later batch, while another is fetched. ``collate_fn`` must draw no numbers,
        and the generators must not be seeded between two batches."""
        self._expected.append(list(indices))
        self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        while self._expected and self._choice.threads > 1:
            self._pool.expect(self.dataset, self._expected.popleft(), self._choice.threads)

    def _drop_ahead(self, states: tuple[Any, ...]) -> None:
        """Drop batches ahead. If generators have moved since ``states``, restore them and use one
        thread from now on."""
        self._pool.drop_ahead()
        self._unmoved = None
        if have_moved(states):
            restore(states)
            self._pool.forbid("its samples draw from the global random generators")

    def _note_samples(self, samples: Any) -> Any:
        """Note the time of samples that were fetched serially, and collate them."""
        if self._began is not None:
            count, began_at, not_waiting_s = self._began
            spent_s = time.perf_counter() - began_at
            waited_s = spent_s - (_not_waiting_s() - not_waiting_s)
            self._choice.note(count, spent_s, spent_s, max(0.0, waited_s))
            self._noted = self._pool.clock.read()
        return self.collate_fn(samples)

    def _fetch_on_threads(self, indices: list[Any]) -> Any:
        is_measured = self._choice.threads > 1 and self._choice.is_measured()
        before = generator_states() if self._unmoved is None else self._unmoved
        began_at = time.perf_counter()
        try:
            samples = self._samples_of(indices)
        except Exception:
            if have_moved(before):
                return self._fetch_again(indices, before)
            raise
        finally:
            self._unmoved = before if self._pool.ahead_count > 0 else None
        if have_moved(before):
            return self._fetch_again(indices, before)
        if is_measured:
            self._note_threads(len(indices), time.perf_counter() - began_at)
        if self._placed is not None:
            self._placed.seed_globals_of(indices[-1])  # as the last sample would have
        return self.collate_fn(samples)

    def _note_threads(self, count: int, spent_s: float) -> None:
        before, self._noted = self._noted, self._pool.clock.read()
        busy_s, cpu_s = (now - then for now, then in zip(self._noted, before, strict=True))
        self._choice.note(count, spent_s, busy_s, max(0.0, busy_s - cpu_s))

    def _samples_of(self, indices: list[Any]) -> list[Any]:
        threads = self._choice.threads
        if self._placed is None:
            return self._pool.fetch(self.dataset, indices, threads, self._fetch_ahead)
        with self._placed.globals_unseeded():
            return self._pool.fetch(self.dataset, indices, threads)

    def _fetch_again(self, indices: list[Any], states: tuple[Any, ...]) -> Any:
        self._drop_ahead(states)
        self._began = None
        return self._serial.fetch(indices)


def _not_waiting_s() -> float:
    """Return the seconds in which the calling thread has run or waited for a CPU."""
    return time.thread_time() + thread_delay_s()
