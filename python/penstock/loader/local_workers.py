# SPDX-License-Identifier: Apache-2.0
"""The worker processes of one pool: how they are started, how they died, how they end."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
import time
from multiprocessing import connection
from pickle import PicklingError
from typing import Any, NoReturn

from penstock import _C
from penstock.errors import add_note
from penstock.loader.fork_turn import fork_turn
from penstock.loader.out_of_memory import explain, explain_later_kills
from penstock.pool.unpicklable import find_unpicklable
from penstock.program_line import warn
from penstock.seams.iterators import (
    STATUS_INTERVAL_S,
    exit_status,
    forget_worker_pids,
    handle_child_deaths,
    raise_if_a_worker_failed,
    watch_worker_pids,
)
from penstock.worker.fetching import FetchSpec
from penstock.worker.held_interrupt import HeldInterrupt
from penstock.worker.pickled_once import PickledOnce
from penstock.worker.start_turns import StartTurns
from penstock.worker.worker_main import WorkerChannel, WorkerSpec, worker_loop

# How long processes have that are to end, and the system to end one that was killed.
_TERMINATED_S_MAX = 1.0
_KILLED_S_MAX = 5.0


class LocalWorkers:
    """Children of the trainer, or of its fork server. Confined to the trainer's thread."""

    def __init__(self, context: Any, *, ends_trainer: bool = True) -> None:
        """``context`` is a context of multiprocessing. With ``ends_trainer`` the death of one is
        raised in the trainer's main thread at once, as torch has it.
        """
        self.processes: list[Any] = []
        self._context = context
        self._ends_trainer = ends_trainer
        self._are_pids_set = False
        self._roots: dict[str, Any] = {}  # the parts of the user's that workers get

    def start(
        self,
        count: int,
        base_seed: int,
        fetch: FetchSpec,
        init_fn: Any,
        spec: WorkerSpec,
        client: _C.Client,
    ) -> None:
        """Starts the workers of ``client``. Raises the exceptions of the system and of pickle; the
        processes made until then are there."""
        is_fresh = self._context.get_start_method() in ("spawn", "forkserver")
        parts = PickledOnce((fetch, init_fn, spec))
        self._roots = {
            "dataset": fetch.dataset, "collate_fn": fetch.collate_fn, "worker_init_fn": init_fn
        }  # fmt: skip
        turns = StartTurns(count, len(os.sched_getaffinity(0)) if is_fresh else count)
        trainer_fds: list[int] = []
        try:
            for worker_id in range(count):
                trainer_fd, worker_fd = client.open_channel(worker_id)
                trainer_fds.append(trainer_fd)
                channel = WorkerChannel(worker_fd, trainer_fds)
                turn = turns.next_turn()
                process = self._context.Process(
                    target=worker_loop, args=(turn, parts, channel, base_seed, worker_id, count)
                )
                turn.begin_with_name(process)
                process.daemon = True
                if is_fresh:
                    self._start(process)
                else:
                    with fork_turn(), HeldInterrupt():
                        self._start(process)
                client.note_started(worker_id, process.pid)
        finally:
            turns.close()
            parts.close()
        if self._ends_trainer:
            # Torch's handler of SIGCHLD raises for these as it would for its own.
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
        """Notes which part of a worker's arguments cannot be pickled."""
        found = find_unpicklable(self._roots)
        if found is not None:
            add_note(
                error,
                f"{found.path}, a {type(found.value).__qualname__}, cannot be pickled, and the "
                f"workers are fresh processes (multiprocessing_context): make it in the worker, "
                f"when it is first used, or leave it out of __getstate__",
            )

    def raise_lost(self, lost: list[Any]) -> NoReturn:
        """Raises torch's error for processes that went away:
        by how they died when the system can tell, else by pid.
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
    def how_it_ended(process: Any) -> str:
        """How a process that went away ended, in words that follow its name."""
        process.join(timeout=STATUS_INTERVAL_S)
        code = process.exitcode
        if code is None:
            return "hung up and has not ended"
        if code >= 0:
            return f"ended with status {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def end(self) -> None:
        """Waits for them, who were told to go, and ends those that do not go in time."""
        try:
            # Torch waits as long for each of them, one after the other.
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
        finally:  # also of an interrupt
            for process in alive:
                # Reaped, so that neither a zombie nor its pipe is left.
                if process.is_alive():  # it has not come to see the signal on a busy machine
                    process.kill()
                    process.join(timeout=_KILLED_S_MAX)


def sleep_if_python_exits() -> None:
    """Keeps a daemon thread quiet while the interpreter exits.

    multiprocessing ends the workers then, before torch's own flag is up, which is no loss to
    report; torch's iterator sleeps on its queue at that point, until the process is gone.
    """
    is_exiting = exit_status() or multiprocessing.util.is_exiting()
    if is_exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
