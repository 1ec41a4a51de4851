# SPDX-License-Identifier: Apache-2.0
"""Make an engine run as many workers as the controller wants.

Once per turn, the adapter asks the engine for its workers, reports them to the controller, and
applies the difference to the controller's orders. Apart from the journal, no step depends on
earlier ones: an adapter that is killed at any time continues where it was. While the journal or the
workers' keys cannot be written, no worker is started; running workers are still tracked and
stopped.

A call of an engine may hang. The adapter abandons a call that takes too long, and continues; until
the call returns, the engine counts as one that does not answer.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock import _pool
from penstock.engines.engine import Engine, EngineError, EngineRefusal, WorkerState
from penstock.engines.journal import Journal
from penstock.engines.worker_keys import WorkerKeys
from penstock.errors import PenstockError
from penstock.pool.worker_spec import DRAIN_GRACE_S

POLL_S = 1.0
_CALL_LIMIT_S = 15.0
_ASK_LIMIT_S = 3.0
_SPENT_INTERVAL_S = 10.0
_SPAWNED_SHOWN_S = 5.0  # an engine must list a requested worker by then
_START_FAILURE_S = 10.0  # a worker that ends by itself earlier has failed to start
_END_TIMEOUT_S = 60.0  # with an engine that does not answer while the pool is to end


@dataclass(frozen=True)
class AdapterLimits:
    """The bounds of the number of workers, and how long they are kept without use."""

    worker_count_min: int = 0
    worker_count_max: int = 64
    idle_s: float = 60.0
    start_allowance_s: float = 120.0
    grace_s: float = DRAIN_GRACE_S  # for a worker to finish its batches before it is ended
    price_per_hour: float | None = None  # of one worker, in the budget's unit
    budget: float | None = None


class Adapter:
    """Confined to one thread. ``log`` is called with sentences for the log. ``worker_keys`` follow
    ``key_folder``, which belongs to the operator."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        limits: AdapterLimits,
        controller: str,
        key_folder: str | None,
        log: Callable[[str], None],
        worker_keys: WorkerKeys | None = None,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._limits = limits
        self._controller = controller
        self._key_folder = key_folder
        self._log = log
        self._call = BoundedCalls(engine.title, _CALL_LIMIT_S)
        self._adapter_id = _pool.draw_identity()
        self._refusal_count = 0
        self._refusal = ""
        self._granted_at: float | None = None  # since the last refusal
        self._seen_at: dict[str, float] | None = None  # when the engine first listed a worker
        self._asked_at: dict[str, float] = {}  # of names that the engine does not list yet
        self._end_at: dict[str, float] = {}  # the end of a stopped worker's grace period
        self._last_message = ""
        # State that must be on disk before a worker is started.
        self._persisted: list[Journal | WorkerKeys] = [journal]
        if worker_keys is not None:
            self._persisted.append(worker_keys)
        self._is_persisted = True  # as last reported
        self._end_unanswered_since: float | None = None  # the engine, while the pool is to end
        self._counted_at: float | None = None
        self._running_count = 0
        self._noted_at = time.monotonic()
        self._spent_ms = float(journal.spent_worker_ms)

    def run_once(self, *, is_to_end: bool = False) -> bool:
        """Run one turn. Return False when the pool has ended: no worker is left. With
        ``is_to_end``, it ends regardless of the controller. Raise PenstockError if the pool is to
        end and the engine has not answered for _END_TIMEOUT_S."""
        for one in self._persisted:
            one.catch_up()
        has_more = self._run_once(is_to_end)
        self._report_persistence()
        return has_more

    def _run_once(self, is_to_end: bool) -> bool:
        trouble = ""
        workers: dict[str, WorkerState] | None = None
        try:
            workers = self._list()
        except EngineError as error:
            trouble = str(error)
        self._report(trouble)
        orders = self._ask(workers or {}, trouble)
        is_to_end = is_to_end or (orders is not None and orders.is_to_end)
        if workers is None:
            if is_to_end:
                self._check_end_timeout(trouble)
            return True
        self._end_unanswered_since = None
        stops = set(workers) if is_to_end else set(orders.stops if orders else ())
        try:
            self._stop(stops & workers.keys())
            if orders is not None and not is_to_end and not self._persistence_error():
                self._spawn(orders.wanted_count - self._present_count(workers, stops))
        except EngineError as error:
            self._report(str(error))
        return not (is_to_end and not workers and not self._asked_at)

    def _check_end_timeout(self, trouble: str) -> None:
        now = time.monotonic()
        if self._end_unanswered_since is None:
            self._end_unanswered_since = now
        if now - self._end_unanswered_since >= _END_TIMEOUT_S:
            raise PenstockError(
                f"the pool ends, but workers may be left: {trouble}; once the engine answers, "
                "start `penstock up` again with the same --state, and then stop it"
            )

    def _list(self) -> dict[str, WorkerState]:
        workers: dict[str, WorkerState] = self._call("list its workers", self._engine.workers)
        now = time.monotonic()
        for name in [*self._asked_at]:
            if name in workers:
                del self._asked_at[name]
            elif now - self._asked_at[name] > _SPAWNED_SHOWN_S:
                del self._asked_at[name]
                self._note_failed_start(name, "was started, but the engine does not list it")
        self._note_failed_starts(workers, now)
        if self._granted_at is not None and now - self._granted_at >= _START_FAILURE_S:
            self._refusal = ""
        for name in [*self._journal.stopped_at]:
            if name in workers:
                workers[name] = WorkerState.STOPPING
            else:
                self._journal.note_gone(name)
                self._end_at.pop(name, None)
        if self._counted_at is not None:
            self._spent_ms += 1e3 * (now - self._counted_at) * self._running_count
        self._counted_at = now
        self._running_count = len(workers)
        if now - self._noted_at >= _SPENT_INTERVAL_S:
            self._noted_at = now
            self._journal.note_spent(int(self._spent_ms))
        return workers

    def _note_failed_starts(self, workers: dict[str, WorkerState], now: float) -> None:
        """Record workers that ended soon after their start. Such a worker would probably fail
        again, so the controller waits longer and longer before it requests another one, as after an
        engine's refusals."""
        before = self._seen_at
        self._seen_at = {
            name: -math.inf if before is None else before.get(name, now) for name in workers
        }
        for name in (before or {}).keys() - workers.keys() - self._journal.stopped_at.keys():
            age_s = now - (before or {})[name]
            if age_s < _START_FAILURE_S:
                self._note_failed_start(name, f"ended {age_s:.0f} s after its start")

    def _note_failed_start(self, name: str, what: str) -> None:
        words = self._engine.last_log_line(name)
        self._note_refusal(
            f"worker {name} {what}" + (f"; its last output: {words}" if words else "")
        )
        self._report(self._refusal)

    def _ask(self, workers: dict[str, WorkerState], trouble: str) -> Any:
        """Return the controller's orders; None, for no change, if it does not answer."""
        limits = self._limits
        report = _pool.ScaleReport()
        report.adapter_id = self._adapter_id
        report.engine = self._engine.title
        report.worker_count_min = limits.worker_count_min
        report.worker_count_max = limits.worker_count_max
        report.idle_ms = int(1e3 * limits.idle_s)
        report.start_allowance_ms = int(1e3 * limits.start_allowance_s)
        report.price_micros_per_hour = int(1e6 * (limits.price_per_hour or 0))
        report.has_budget = limits.budget is not None
        report.budget_micros = int(1e6 * (limits.budget or 0))
        report.spent_worker_ms = int(self._spent_ms)
        report.refusal_count = self._refusal_count
        report.refusal = self._persistence_error() or self._refusal
        report.trouble = trouble
        asked = dict.fromkeys(self._asked_at, WorkerState.STARTING)
        report.workers = [
            _pool.EngineWorker(name, int(state)) for name, state in (asked | workers).items()
        ]
        try:
            return _pool.report_scale(self._controller, self._key_folder, report, _ASK_LIMIT_S)
        except PenstockError as error:
            self._report(f"no orders from the controller: {error}")
            return None

    def _present_count(self, workers: dict[str, WorkerState], stops: set[str]) -> int:
        stopping = {name for name, state in workers.items() if state == WorkerState.STOPPING}
        return len((workers.keys() | self._asked_at.keys()) - stopping - stops)

    def _stop(self, names: set[str]) -> None:
        for name in sorted(names):
            if name not in self._journal.stopped_at:
                self._journal.note_stop(name, time.time())
                self._end_at[name] = time.monotonic() + self._limits.grace_s
                self._call(f"stop {name}", partial(self._engine.stop, name, at_once=False))
            elif time.monotonic() >= self._end_of_grace(name):
                self._call(f"end {name}", partial(self._engine.stop, name, at_once=True))

    def _end_of_grace(self, name: str) -> float:
        """Return the end of a worker's grace period by the monotonic clock. For a worker stopped by
        an earlier process, the journal has the system time, which is read once and clamped to
        plausible values."""
        if name not in self._end_at:
            age_s = time.time() - self._journal.stopped_at[name]
            left_s = self._limits.grace_s - min(max(age_s, 0.0), self._limits.grace_s)
            self._end_at[name] = time.monotonic() + left_s
        return self._end_at[name]

    def _spawn(self, count: int) -> None:
        if count <= 0:
            return
        names = self._journal.take_names(count)
        if not names:
            return
        now = time.monotonic()
        self._asked_at.update(dict.fromkeys(names, now))
        try:
            self._call(f"start {count} workers", lambda: self._engine.spawn(names))
        except EngineRefusal as error:
            for name in names[error.granted_count :]:
                del self._asked_at[name]
            self._note_refusal(str(error))
            self._report(
                f"the engine {self._engine.title} started {error.granted_count} of {count} "
                f"workers: {error}"
            )
        except EngineError as error:  # the engine's next list shows which ones were started
            self._note_refusal(str(error))
            self._report(str(error))
        else:
            self._granted_at = now

    def _note_refusal(self, reason: str) -> None:
        self._refusal_count += 1
        self._granted_at = None
        self._refusal = reason

    def _report(self, sentence: str) -> None:
        if sentence and sentence != self._last_message:
            self._log(sentence)
        self._last_message = sentence or self._last_message

    def _persistence_error(self) -> str:
        return next((one.trouble for one in self._persisted if one.trouble), "")

    def _report_persistence(self) -> None:
        trouble = self._persistence_error()
        if trouble and self._is_persisted:
            self._refusal_count += 1
            self._log(f"no workers are started, and running workers continue, because {trouble}")
        elif not trouble and not self._is_persisted:
            self._log("writing works again; workers are started as needed")
        self._is_persisted = not trouble

    def close(self) -> None:
        self._journal.note_spent(int(self._spent_ms))


class BoundedCalls:
    """For one thread. Calls run on a separate thread, one after the other."""

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
        """Return the result of ``call``, or raise its EngineRefusal. Raise EngineError for any
        other exception, and after the time limit."""
        if self._hanging is not None:
            try:  # the outcome of an abandoned call
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
        if isinstance(outcome, EngineRefusal | EngineError):
            raise outcome
        raise EngineError(
            f"the engine {self._title} failed to {what}: {type(outcome).__name__}: {outcome}"
        ) from outcome

    def _trouble(self, what: str) -> EngineError:
        return EngineError(
            f"the engine {self._title} has not answered a call to {what} within {self._limit_s:g} s"
        )
