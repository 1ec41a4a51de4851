# SPDX-License-Identifier: Apache-2.0
"""Workers that a trainer starts itself beside a pool: ``num_workers`` of them.

They serve as the pool's workers do, but in one process each, and are reached on loopback with the
keys that this user's processes share; the job comes to them in the same way. Their batches lie in
shared memory, as those of local workers do. No controller knows them.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import Any

from penstock import _C, _pool
from penstock.errors import PenstockError
from penstock.loader.fork_turn import fork_turn
from penstock.pool.code_folder import CodeFolder
from penstock.pool.pool_worker import run_worker
from penstock.pool.worker_spec import PoolWorkerSpec
from penstock.worker.held_interrupt import HeldInterrupt, release_in_child

_START_S_MAX = 300.0  # spawn imports torch, on a busy machine one after the other
_END_S_MAX = 5.0


class OwnWorkers:
    """Children of the trainer, or of its fork server. Confined to the trainer's thread."""

    def __init__(self, context: Any) -> None:
        """``context`` is a context of multiprocessing."""
        self.processes: list[Any] = []
        # The id of each, its endpoint, and the name at which it hands batches over.
        self.addresses: list[tuple[int, str, str]] = []
        self._context = context
        self._code_folders: list[CodeFolder] = []
        self._dead: set[int] = set()

    def start(self, count: int) -> None:
        """Raises PenstockError when one of them did not come to listen."""
        if count == 0:
            return
        pipes = []
        names = []
        # Made before the workers are there, of which one that is killed could leave half of it.
        # They are told where it is: a fork server's environment is that of its own start.
        key_folder = _pool.shared_key_folder()
        for _ in range(count):
            receiver, sender = self._context.Pipe(duplex=False)
            code = CodeFolder()
            self._code_folders.append(code)
            handover = f"penstock-{secrets.token_hex(16)}"
            names.append(handover)
            process = self._context.Process(
                target=_run_own_worker,
                args=(sender, code.path, os.getpid(), handover, key_folder),
                daemon=True,
            )
            with fork_turn(), HeldInterrupt():
                process.start()
                self.processes.append(process)
            sender.close()
            pipes.append(receiver)
        deadline = time.monotonic() + _START_S_MAX
        for receiver, process, handover in zip(pipes, self.processes, names, strict=True):
            with receiver:
                self.addresses.append((*self._address(receiver, process, deadline), handover))

    def _address(self, receiver: Any, process: Any, deadline: float) -> tuple[int, str]:
        try:
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                worker_id, endpoint = receiver.recv()
                return worker_id, endpoint
        except EOFError:
            pass
        process.join(timeout=0.1)
        how = "is still starting" if process.is_alive() else f"ended with {process.exitcode}"
        raise PenstockError(
            f"a worker of DataLoader's own (num_workers={len(self.processes)}) beside the pool did "
            f"not come to listen and {how}; see its output on stderr"
        )

    def take_dead(self) -> dict[int, Any]:
        """The processes that have died since the last call, by their workers' ids."""
        dead = {
            worker_id: process
            for process, (worker_id, _, _) in zip(self.processes, self.addresses, strict=False)
            if worker_id not in self._dead and not process.is_alive()
        }
        self._dead.update(dead)
        return dead

    def end(self) -> None:
        """Ends them; their trainer has said goodbye."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + _END_S_MAX
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(timeout=_END_S_MAX)
        for code in self._code_folders:
            code.remove()


def _run_own_worker(
    sender: Any, code_root: str, trainer_pid: int, handover: str, key_folder: str
) -> None:
    try:
        release_in_child()
    except KeyboardInterrupt:
        return  # the trainer raises it

    def started(server: _C.PoolServer) -> None:
        sender.send((server.worker_id, server.endpoint))
        sender.close()

    spec = PoolWorkerSpec.of_trainer(trainer_pid, handover, key_folder)
    run_worker(spec, code_root, started, lambda text: print(text, file=sys.stderr))
