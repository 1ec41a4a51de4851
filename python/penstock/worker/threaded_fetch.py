# SPDX-License-Identifier: Apache-2.0
"""Fetch the samples of a batch on several threads, for storage with high latency.

The batch is the same as from torch's serial fetch: samples in the order of their indices, the error
of the first failing sample, collate_fn on the thread that requests the batch. Threads without a
sample of this batch go on with the batches that are expected next; without those, no thread is
active between two batches. A sample sees the state of the requesting thread: its grad and inference
modes, CPU autocast, default device, CUDA stream, context variables and number of torch's threads.

concurrent.futures is not used because it joins its threads at interpreter exit, forever if a
dataset blocks. These threads are daemons, and are joined for at most ``_END_SECONDS_MAX``.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from penstock.compat.iterators import MapDatasetFetcher, set_thread_name
from penstock.stream.batch_seeds import below_subsets

# For threads that are in the user's code when they should end: long enough for most storage
# requests, since a thread that returns from native code during interpreter shutdown can abort the
# process; short enough not to look like a hang.
_END_SECONDS_MAX = 1.0
# A signal that arrives just before a thread starts to sleep does not wake it; without a periodic
# check, one in ten Ctrl-C was lost if sent when the last sample started.
_INTERRUPT_CHECK_S = 0.5
_LOOK_AHEAD_S = 0.005  # between looks for further batches while one is fetched


class ThreadedMapFetcher(MapDatasetFetcher):
    """Torch's fetcher of map-style datasets, with a batch's samples fetched on ``pool``.

    Confined to one thread.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        pool: FetchPool,
    ) -> None:
        super().__init__(dataset, auto_collation, collate_fn, drop_last)
        assert auto_collation, "a loader without batches refuses fetch_threads > 1"
        self._pool = pool

    def fetch(self, possibly_batched_index: Any) -> Any:
        if fetches_whole_batches(self.dataset):
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        return self.collate_fn(self._pool.fetch(self.dataset, list(possibly_batched_index)))

    def expect(self, indices: Any) -> None:
        """Announce a later batch, while another is fetched."""
        if not fetches_whole_batches(self.dataset):
            self._pool.expect(self.dataset, list(indices))


def fetches_whole_batches(dataset: Any) -> bool:
    """Return whether the dataset itself has a ``__getitems__``, which is called once per batch.

    Torch's Subset has one that only fetches from the underlying dataset sample by sample.
    """
    return bool(getattr(below_subsets(dataset), "__getitems__", None))


_of_thread = threading.local()


def is_fetching_ahead() -> bool:
    """Return whether the calling thread fetches a sample of a later batch than the current one."""
    batch = getattr(_of_thread, "batch", None)
    return batch is not None and batch.is_ahead


class FetchPool:
    """Up to ``thread_count`` threads named pk_fetch_N, started when a batch first needs them.

    Confined to one thread; a process forked from this one creates separate threads. The threads end
    with :meth:`close`, with this object, or with the interpreter.
    """

    def __init__(self, thread_count: int) -> None:
        self._thread_count = thread_count
        self.look_ahead: Callable[[], None] | None = None  # calls expect() for what is known by now
        self._make_empty()

    def _make_empty(self) -> None:
        self._pid = os.getpid()
        self.clock = WorkClock()
        self._batches: SimpleQueue[_BatchFetch | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ahead: deque[_BatchFetch] = deque()  # in the order in which they are expected
        self._unfinished: list[_BatchFetch] = []
        self._end = weakref.finalize(
            self, _end_threads, self._pid, self._batches, self._threads, self._ahead
        )

    def fetch(
        self,
        dataset: Any,
        indices: list[Any],
        thread_count: int | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Return the samples at ``indices``, in that order. Block until the batch is complete.
        ``thread_count`` is the number of threads that fetch them, by default all. ``on_start`` is
        called when they have been started, and may call :meth:`expect`.

        Raise the exception of the first failing sample in that order; samples that were not started
        by then are skipped. An interrupt is raised immediately; the next call then waits for the
        samples that are still being fetched.
        """
        if self._pid != os.getpid():
            self._make_empty()
        for one in self._unfinished:
            one.wait()
        self._unfinished.clear()
        try:
            if self.is_next(dataset, indices):
                batch = self._ahead.popleft()
                batch.is_ahead = False
                self._unfinished.append(batch)
            else:
                self.drop_ahead()
                batch = _BatchFetch(dataset, indices, _ThreadState.current(), self.clock)
                self._unfinished.append(batch)
                self._start(batch, thread_count or self._thread_count)
            on_start()
            if self.look_ahead is None:
                batch.wait()
            else:
                self._wait_and_look(batch, self.look_ahead)
        except BaseException:
            batch.cancel()
            self._unfinished += _cancel_all(self._ahead)
            raise
        self._unfinished.clear()
        return batch.take_samples()

    def _wait_and_look(self, batch: _BatchFetch, look_ahead: Callable[[], None]) -> None:
        look_ahead()
        while not batch.is_over(_LOOK_AHEAD_S):
            look_ahead()

    def expect(self, dataset: Any, indices: list[Any], thread_count: int | None = None) -> None:
        """Announce a batch that is fetched after the current one and those announced before. Its
        samples are started as soon as threads have none of earlier batches; if another batch is
        fetched in its place, they are dropped. ``thread_count`` is as in :meth:`fetch`."""
        batch = _BatchFetch(dataset, indices, _ThreadState.current(), self.clock)
        batch.is_ahead = True
        self._ahead.append(batch)
        self._start(batch, thread_count or self._thread_count)

    @property
    def ahead_count(self) -> int:
        """The number of expected batches that have not been fetched."""
        return len(self._ahead)

    def is_next(self, dataset: Any, indices: list[Any]) -> bool:
        """Return whether this batch is the first one fetched ahead."""
        return bool(self._ahead) and self._ahead[0].is_of(dataset, indices)

    def drop_ahead(self) -> None:
        """Wait for samples of expected batches that are being fetched, and start no further."""
        self._unfinished = _cancel_all(self._ahead)
        for one in self._unfinished:
            one.wait()
        self._unfinished.clear()

    def _start(self, batch: _BatchFetch, thread_count: int) -> None:
        count = min(thread_count, batch.size)
        for _ in range(count):
            self._batches.put(batch)
        self._start_threads(count)

    def _start_threads(self, count: int) -> None:
        while len(self._threads) < count:
            name = f"pk_fetch_{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(self._batches,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads; wait up to ``_END_SECONDS_MAX`` for threads in the user's code."""
        self._end()


def _serve(batches: SimpleQueue[_BatchFetch | None]) -> None:
    set_thread_name(threading.current_thread().name)
    while (batch := batches.get()) is not None:
        batch.state.copy_context().run(batch.work)
        del batch  # an idle thread must not keep samples alive
    batches.put(None)  # for the next thread


def _cancel_all(batches: deque[_BatchFetch]) -> list[_BatchFetch]:
    """Cancel and remove batches; return them, since some of their samples may be in progress."""
    cancelled = []
    while batches:
        cancelled.append(batches.popleft())
        cancelled[-1].cancel()
    return cancelled


def _end_threads(
    owner_pid: int,
    batches: SimpleQueue[_BatchFetch | None],
    threads: list[threading.Thread],
    ahead: deque[_BatchFetch],
) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child has none of the threads
    _cancel_all(ahead)
    batches.put(None)
    deadline = time.monotonic() + _END_SECONDS_MAX
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class WorkClock:
    """The time in which threads fetch samples, and their CPU time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = 0  # threads
        self._began_at = 0.0
        self._busy_s = self._cpu_s = 0.0

    def begin(self) -> None:
        """Note that the calling thread starts to work."""
        with self._lock:
            if self._working == 0:
                self._began_at = time.perf_counter()
            self._working += 1

    def end(self, cpu_s: float) -> None:
        """Note that a thread has worked, with this CPU time."""
        with self._lock:
            self._cpu_s += cpu_s
            self._working -= 1
            if self._working == 0:
                self._busy_s += time.perf_counter() - self._began_at

    def read(self) -> tuple[float, float]:
        """Return the seconds in which one thread or more worked, and the CPU time of threads that
        have ended their work."""
        with self._lock:
            now_s = time.perf_counter() - self._began_at if self._working else 0.0
            return self._busy_s + now_s, self._cpu_s


class _BatchFetch:
    """The samples of one batch while they are fetched.

    Samples are claimed in the order of the batch. So every sample before a failing one was started,
    too, all of them are waited for, and the choice of the first error does not depend on timing.

    Thread-safe.
    """

    def __init__(
        self, dataset: Any, indices: list[Any], state: _ThreadState, clock: WorkClock
    ) -> None:
        self.state = state
        self._clock = clock
        self.is_ahead = False
        self._is_over = threading.Event()
        self._dataset = dataset
        self._indices = indices
        self._lock = threading.Lock()
        self._claimed_count = 0
        self._claims_end = len(indices)
        self._thread_count = 0  # in work()
        self._samples: list[Any] = [None] * len(indices)
        self._failures: dict[int, BaseException] = {}  # by position in the batch
        if not indices:
            self._is_over.set()

    @property
    def size(self) -> int:
        return len(self._indices)

    def is_of(self, dataset: Any, indices: list[Any]) -> bool:
        return self._dataset is dataset and self._indices == indices

    def work(self) -> None:
        """Fetch samples until none is left to claim."""
        if not self._try_join():
            return
        self._clock.begin()
        began_cpu_s = time.thread_time()
        _of_thread.batch = self
        try:
            with contextlib.ExitStack() as stack:
                self.state.enter(stack)
                while (position := self._claim()) is not None:
                    self._fetch(position)
        except BaseException as failure:  # of entering the state or leaving it
            self._fail(len(self._indices), failure)
        finally:
            del _of_thread.batch
            self._clock.end(time.thread_time() - began_cpu_s)
            self._leave()

    def wait(self) -> None:
        """Block until no sample is being fetched and no further one will be started."""
        while not self.is_over(_INTERRUPT_CHECK_S):
            pass

    def is_over(self, seconds: float) -> bool:
        """Block for that long, or until :meth:`wait` would return; return whether it would."""
        return self._is_over.wait(seconds)

    def cancel(self) -> None:
        """Start no further samples."""
        with self._lock:
            self._claims_end = self._claimed_count
            self._settle()

    def take_samples(self) -> list[Any]:
        """Return the samples, or raise for the first that failed. Call it once, when complete."""
        samples, failures = self._samples, self._failures
        # A traceback holds the frame of _fetch(), and this object with it.
        self._samples, self._failures = [], {}
        if not failures:
            return samples
        place = min(failures)
        first = failures[place]
        if place < len(self._indices):
            failed_index = self._indices[place]  # noqa: F841 - for format_sample()
        try:
            raise first
        finally:
            del first, failures, samples

    def _try_join(self) -> bool:
        with self._lock:
            if self._claimed_count == self._claims_end:
                return False
            self._thread_count += 1
            return True

    def _claim(self) -> int | None:
        with self._lock:
            if self._claimed_count == self._claims_end:
                return None
            self._claimed_count += 1
            return self._claimed_count - 1

    def _fetch(self, position: int) -> None:
        try:
            self._samples[position] = self._dataset[self._indices[position]]
        except BaseException as failure:  # raised by the thread that asked for the batch
            self._fail(position, failure)

    def _fail(self, position: int, failure: BaseException) -> None:
        with self._lock:
            self._failures[position] = failure
        self.cancel()

    def _leave(self) -> None:
        with self._lock:
            self._thread_count -= 1
            self._settle()

    def _settle(self) -> None:
        if self._thread_count == 0 and self._claimed_count == self._claims_end:
            self._is_over.set()


@dataclass(frozen=True, slots=True)
class _ThreadState:
    """The settings of a thread, in torch and in Python, that a sample's code can observe."""

    context: contextvars.Context
    torch_thread_count: int
    is_grad_enabled: bool
    is_inference: bool
    is_autocast_enabled: bool
    autocast_dtype: torch.dtype
    default_device: torch.device
    cuda_stream: torch.cuda.Stream | None  # with its device

    @staticmethod
    def current() -> _ThreadState:
        return _ThreadState(
            contextvars.copy_context(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_device(),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    def copy_context(self) -> contextvars.Context:
        """Return a copy, because only one thread at a time can be in a context."""
        return self.context.copy()

    def enter(self, stack: contextlib.ExitStack) -> None:
        """Put the calling thread into this state until ``stack`` is closed."""
        # Setting the number affects this thread and threads that start later, so it is set only if
        # it differs.
        if torch.get_num_threads() != self.torch_thread_count:
            torch.set_num_threads(self.torch_thread_count)
        if self.is_inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
        if self.is_autocast_enabled:
            stack.enter_context(torch.autocast("cpu", dtype=self.autocast_dtype))
        if self.cuda_stream is not None:
            stack.enter_context(torch.cuda.stream(self.cuda_stream))
        if torch.get_default_device() != self.default_device:
            stack.enter_context(self.default_device)
