# SPDX-License-Identifier: Apache-2.0
"""The process of a pool that one program has to itself: it runs the controller and supervises the
workers. :mod:`.local_pool` starts it.

It ends when the program ends, for any reason, and on SIGTERM.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass

from penstock import _pool
from penstock.errors import PenstockError
from penstock.pool.descriptor_limit import raise_descriptor_limit
from penstock.pool.worker_spec import PATIENCE_S, PoolWorkerSpec
from penstock.pool.worker_supervisor import Supervisor

GRACE_S = 5.0  # for workers to leave after the end of the program that they served
_LOOPBACK = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class KeeperOrders:
    worker_count: int
    key_folder: str | None  # None: the keys that this user's processes share
    program_fd: int  # a descriptor of the program's process
    report_fd: int  # for one report; open for as long as the keeper lives


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """A report that the controller listens, or why there is no pool."""

    pid: int
    endpoint: str = ""
    refusal: str = ""

    def write(self, fd: int) -> None:
        os.write(fd, json.dumps(asdict(self)).encode() + b"\n")


def keep_pool(settings: dict[str, object]) -> int:
    """Run the pool that a `KeeperOrders` describes; return the exit code."""
    orders = KeeperOrders(**settings)  # type: ignore[arg-type]
    for fd in (orders.program_fd, orders.report_fd):
        os.set_inheritable(fd, False)
    raise_descriptor_limit()
    try:
        controller = _pool.Controller.start(_LOOPBACK, orders.key_folder)
        spec = PoolWorkerSpec(
            bind=_LOOPBACK,
            advertised=None,
            data_bind=None,
            data_advertised=None,
            controller=controller.endpoint,
            key_folder=orders.key_folder,
            patience_s=PATIENCE_S,
            parent_pid=os.getpid(),
        )
        supervisor = Supervisor([spec] * orders.worker_count, is_quiet=True)
    except (PenstockError, ValueError, OSError) as error:
        KeeperReport(os.getpid(), refusal=str(error)).write(orders.report_fd)
        return 1
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC)
    serving = threading.Thread(target=controller.run, args=(stop_read,))
    serving.start()
    KeeperReport(os.getpid(), endpoint=controller.endpoint).write(orders.report_fd)
    try:
        return supervisor.run(end_fd=orders.program_fd, grace_s=GRACE_S)
    finally:
        os.write(stop_write, b"x")
        serving.join()
