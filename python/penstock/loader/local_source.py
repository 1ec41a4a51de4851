# SPDX-License-Identifier: Apache-2.0
"""Source of an iterator whose workers this process starts: its stream's requests and events, and
the start, death and exit of the worker processes.
"""

from __future__ import annotations

import multiprocessing.util
import os
import pickle
import signal
import threading
import time
from multiprocessing import connection
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from penstock import _C
from penstock.compat.iterators import (
    STATUS_INTERVAL_S,
    exit_status,
    forget_worker_pids,
    handle_child_deaths,
    raise_if_a_worker_failed,
    watch_worker_pids,
)
from penstock.errors import add_note
from penstock.loader.client_cache import Recaller
from penstock.loader.loader_run import LoaderRun
from penstock.loader.options import LoaderOptions
from penstock.loader.process_limits import explain, explain_later_kills, fork_lock, retire_at_forks
from penstock.loader.source import NativeThread, StreamOptions
from penstock.pool.job_pickle import find_unpicklable
from penstock.pool.worker_spec import arena_bytes
from penstock.program_line import warn
from penstock.stream.progress import Progress
from penstock.worker.fetching import FetchSpec
from penstock.worker.worker_main import WorkerChannel, WorkerSpec, worker_loop
from penstock.worker.worker_process import format_pending_batch
from penstock.worker.worker_start import DeferredInterrupt, PickledOnce, StartPermits

if TYPE_CHECKING:
    from penstock.graph.plan import Plan

_SHARD_ENDED = int(_C.Client.Event.SHARD_ENDED)
_WORKER_LOST = int(_C.Client.Event.WORKER_LOST)
_STRETCH = 4  # as kStretch of the native stream
_SLABS_MAX = 64
_LOOK_INTERVAL_S = 1.0  # between checks for workers that died instead of answering
# Time limits for processes to exit, and for the system to remove a killed one.
_TERMINATED_S_MAX = 1.0
_KILLED_S_MAX = 5.0


class LocalSource:
    """A `Source`: ``worker_count`` children of this process, or of its fork server."""

    def __init__(
        self,
        options: LoaderOptions,
        run: LoaderRun,
        of_stream: StreamOptions,
        fetch: FetchSpec,
        progress: Progress,
        worker_count: int,
        base_seed: int,
    ) -> None:
        self._any_worker = options.any_worker_serves(worker_count)
        self._is_iterable = of_stream.is_iterable
        # One worker may have made all the batches that the trainer has, while another makes one.
        slab_count = of_stream.prefetch_depth
        if self._any_worker:
            slab_count = min(_SLABS_MAX, _STRETCH * of_stream.prefetch_depth * worker_count)
        self._workers = LocalWorkers(
            options.multiprocessing_context or torch.multiprocessing,
            ends_trainer=not self._any_worker,
        )
        self.processes = self._workers.processes
        self._gone: set[int] = set()  # workers that died and that the others replace
        self._is_active: list[bool] = []  # by worker: it has not ended its part of the epoch
        self._client = _C.Client(
            worker_count=worker_count,
            shard_count=1 if self._any_worker else of_stream.shard_count,
            slab_count=slab_count,
            any_worker=self._any_worker,
            keep_workers=bool(options.persistent_workers),
            **of_stream.of_client(options, run.provenance),
        )
        self.stream = of_stream.open_stream(self._client)
        retire_at_forks(self._client)
        self.native_thread = NativeThread()
        self.recaller: Recaller | None = None
        spec = WorkerSpec(
            slab_count,
            arena_bytes(),
            self._any_worker,
            os.getpid(),
            of_stream.shard_count,
            of_stream.is_seeded_by_batch,
            progress.starts,
            dict(enumerate(progress.states_before)),
            of_stream.may_begin_early,
            progress.state_interval,
        )
        self._question = 0  # the last one about states
        self._timeout_s = float(options.timeout)  # 0: without a limit
        self._state_interval = progress.state_interval
        try:
            self._workers.start(
                worker_count, base_seed, fetch, options.worker_init_fn, spec, self._client
            )
            self._client.start()  # native threads start after the last fork
        except BaseException:
            self.close()
            raise
        for message in run.prefixes.values():
            self.install_prefix(message)

    def begin_epoch(self, progress: Progress) -> None:
        self._is_active = [place not in self._gone for place in range(len(self.processes))]

    def want_states(self, every: int) -> None:
        if every != self._state_interval:
            self._state_interval = every
            self._client.want_states(every, 0)

    def ask_states(self) -> dict[int, Any]:
        self._question += 1
        self._client.want_states(self._state_interval or 1, self._question)
        states: dict[int, bytes | None] = {}
        missing = set(range(len(self.processes))) - self._gone
        began_at = time.monotonic()
        while missing:
            answer = self._client.worker_states(_LOOK_INTERVAL_S)
            if answer is None:
                self._check_unanswered(missing, time.monotonic() - began_at)
                continue
            # A child of this process wrote it.
            question, worker_id, of_worker = pickle.loads(answer)
            if question == self._question:  # an earlier question was interrupted
                missing.discard(worker_id)
                states.update(of_worker)
        return {
            shard_id: pickle.loads(state) for shard_id, state in states.items() if state is not None
        }

    def _check_unanswered(self, missing: set[int], waited_s: float) -> None:
        """Check the workers with missing answers: dead workers will not send any."""
        dead = [place for place in missing if not self.processes[place].is_alive()]
        if dead and (not self._any_worker or len(self._gone) + len(dead) == len(self.processes)):
            self._workers.raise_lost([self.processes[place] for place in dead])
        for place in dead:
            self._warn_of_lost_worker(place)
            missing.discard(place)
        if missing and 0 < self._timeout_s < waited_s:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout_s:g} seconds: workers "
                f"{sorted(missing)} did not report the state of their dataset, which the next "
                f"epoch needs; check whether the dataset blocks them"
            )

    def note(self, event: int, value: Any, extra: Any) -> None:
        if event == _SHARD_ENDED:
            if extra:  # it was the worker's last
                self._is_active[value] = False
            return
        sleep_if_python_exits()
        if event == _WORKER_LOST:
            self._workers.raise_lost([self.processes[value]])
        self._warn_of_lost_worker(value)

    def end_epoch(self) -> None:
        # No wait depends on a worker whose last batch another worker has made as well.
        for place, process in enumerate(self.processes):
            if self._any_worker and self._is_active[place] and not process.is_alive():
                self._warn_of_lost_worker(place)

    def _warn_of_lost_worker(self, place: int) -> None:
        """Warn once about a worker's death that the others compensate for."""
        if place in self._gone:
            return
        self._gone.add(place)
        self._is_active[place] = False
        process = self.processes[place]
        warn(
            f"DataLoader worker {place} (pid {process.pid}) "
            f"{self._workers.describe_exit(process)}; the remaining workers "
            f"({sum(self._is_active)}) make its unfinished batches",
        )

    def check(self) -> None:
        dead = [
            process
            for process, is_active in zip(self.processes, self._is_active, strict=True)
            if is_active and not process.is_alive()
        ]
        # If any worker may make any batch, the native side reports the workers whose answers are
        # missing.
        if dead and (not self._any_worker or len(dead) == sum(self._is_active)):
            self._workers.raise_lost(dead)

    def timeout_details(self) -> str:
        awaited = self._client.awaited()
        if awaited is None:
            return ""
        worker_id, sequence, indices, is_pickled = awaited
        samples = ""
        if not self._is_iterable:
            samples = repr(pickle.loads(indices) if is_pickled else indices)
        return "\n" + format_pending_batch(
            worker_id, self.processes[worker_id].pid, sequence, samples
        )

    def counters(self) -> dict[str, Any]:
        return self.stream.counters()

    @property
    def workers_apart(self) -> dict[str, str]:
        return {}  # they run on this machine, and compare themselves with each prefix

    def install_prefix(self, message: bytes) -> None:
        self._client.install_prefix(message)

    def remove_prefixes(self) -> None:
        self._client.remove_prefixes()

    def show_plan(self, plan: Plan | None, change_count: int) -> None:
        """Do nothing: no display shows the trainer's local workers."""

    def set_shipment(self, message: bytes | None) -> None:
        """Ignore the message: leaves are in shared memory anyway, so there is no gain."""

    def close(self) -> None:
        try:
            self._client.stop()
            self.native_thread.ended.set()
        finally:
            self._workers.end()


class LocalWorkers:
    """Children of the trainer, or of its fork server. Confined to the trainer's thread."""

    def __init__(self, context: Any, *, ends_trainer: bool = True) -> None:
        """Take ``context``, a multiprocessing context. With ``ends_trainer``, the death of a worker
        is raised immediately in the trainer's main thread, as in torch.
        """
        self.processes: list[Any] = []
        self._context = context
        self._ends_trainer = ends_trainer
        self._are_pids_set = False
        self._roots: dict[str, Any] = {}  # the user's objects that workers get

    def start(
        self,
        count: int,
        base_seed: int,
        fetch: FetchSpec,
        init_fn: Any,
        spec: WorkerSpec,
        client: _C.Client,
    ) -> None:
        """Start the workers of ``client``. Raises the exceptions of the system and of pickle;
        processes started before the exception remain."""
        is_fresh = self._context.get_start_method() in ("spawn", "forkserver")
        parts = PickledOnce((fetch, init_fn, spec))
        self._roots = {
            "dataset": fetch.dataset, "collate_fn": fetch.collate_fn, "worker_init_fn": init_fn
        }  # fmt: skip
        permits = StartPermits(count, len(os.sched_getaffinity(0)) if is_fresh else count)
        trainer_fds: list[int] = []
        try:
            for worker_id in range(count):
                trainer_fd, worker_fd = client.open_channel(worker_id)
                trainer_fds.append(trainer_fd)
                channel = WorkerChannel(worker_fd, trainer_fds)
                permit = permits.next_permit()
                process = self._context.Process(
                    target=worker_loop, args=(permit, parts, channel, base_seed, worker_id, count)
                )
                permit.delay_start(process)
                process.daemon = True
                if is_fresh:
                    self._start(process)
                else:
                    with fork_lock(), DeferredInterrupt():
                        self._start(process)
                client.note_started(worker_id, process.pid)
        finally:
            permits.close()
            parts.close()
        if self._ends_trainer:
            # Torch's handler of SIGCHLD raises for these as for its workers.
            self._set_pids(self.processes)
            handle_child_deaths()
        explain_later_kills()  # by that handler, too

    def _set_pids(self, processes: list[Any]) -> None:
        pids = tuple(process.pid for process in processes)
        watch_worker_pids(id(self), pids)
        self._are_pids_set = True

    def _start(self, process: Any) -> None:
        try:
            process.start()
        except (TypeError, AttributeError, PicklingError) as error:
            self._name_unpicklable(error)
            warn(
                "Got pickle error when attempting to start a worker Process. "
                "This might be because the worker Process arguments are not picklable. "
                "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX "
                "platforms "
                "to 'forkserver', which requires the worker Process arguments to be picklable. "
                "You can also try multiprocessing.set_start_method('fork').",
                UserWarning,
            )
            raise
        self.processes.append(process)

    def _name_unpicklable(self, error: Exception) -> None:
        """Note which part of a worker's arguments cannot be pickled."""
        found = find_unpicklable(self._roots)
        if found is not None:
            add_note(
                error,
                f"{found.path}, a {type(found.value).__qualname__}, cannot be pickled, but the "
                f"workers are new processes (multiprocessing_context), which receive it in a "
                f"pickle; create it in the worker at its first use, or leave it out of "
                f"__getstate__",
            )

    def raise_lost(self, lost: list[Any]) -> NoReturn:
        """Raise torch's error for processes that died:
        with the cause of death if the system reports it, else with their pids.
        """
        connection.wait([process.sentinel for process in lost], timeout=STATUS_INTERVAL_S)
        for process in lost:
            try:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                pass  # a child of the fork server, or reaped already
        if not self._are_pids_set:
            self._set_pids(lost)
        try:
            raise_if_a_worker_failed()
        except RuntimeError as error:
            raise explain(error) from None
        pids = ", ".join(str(process.pid) for process in lost)
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")

    @staticmethod
    def describe_exit(process: Any) -> str:
        """Describe how a process ended, in words that follow its name."""
        process.join(timeout=STATUS_INTERVAL_S)
        code = process.exitcode
        if code is None:
            return "closed its connection but has not ended"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def end(self) -> None:
        """Join the workers, which were asked to exit, and terminate late ones."""
        try:
            # Torch waits this long for each of them in turn.
            deadline = time.monotonic() + STATUS_INTERVAL_S
            for process in self.processes:
                process.join(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            if self._are_pids_set:
                forget_worker_pids(id(self))
                self._are_pids_set = False
            self._end_alive()

    def _end_alive(self) -> None:
        alive = [process for process in self.processes if process.is_alive()]
        try:
            for process in alive:
                process.terminate()
            deadline = time.monotonic() + _TERMINATED_S_MAX
            for process in alive:
                process.join(timeout=max(0.0, deadline - time.monotonic()))
        finally:  # also on an interrupt
            for process in alive:
                # Reap it, so that neither a zombie nor its pipe remains.
                if process.is_alive():  # on a busy machine, it has not handled the signal yet
                    process.kill()
                    process.join(timeout=_KILLED_S_MAX)


def sleep_if_python_exits() -> None:
    """Keep a daemon thread quiet while the interpreter exits.

    multiprocessing then ends the workers before torch's flag is set, so their end is no loss to
    report; torch's iterator sleeps on its queue at that point, until the process exits.
    """
    is_exiting = exit_status() or multiprocessing.util.is_exiting()
    if is_exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
