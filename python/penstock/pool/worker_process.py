# SPDX-License-Identifier: Apache-2.0
"""One of the processes that `penstock worker` starts."""

from __future__ import annotations

import os

from penstock import _C, _pool
from penstock.errors import PenstockError
from penstock.pool.pool_log import PoolLog, short_id
from penstock.pool.pool_worker import run_worker
from penstock.pool.worker_errors import is_shortage
from penstock.pool.worker_spec import PoolWorkerSpec


def run_child(settings: dict[str, object]) -> int:
    """Serves as the settings of a `PoolWorkerSpec` say; returns the exit code, which means nothing
    to the supervisor: its ExitPipe tells it why this process ends."""
    spec = PoolWorkerSpec(**settings)  # type: ignore[arg-type]
    if spec.exit_fd >= 0:
        os.set_inheritable(spec.exit_fd, False)  # it is not for what a dataset starts
    log = PoolLog("penstock worker", is_quiet=spec.is_quiet)
    pid = os.getpid()
    has_started = False

    def started(server: _C.PoolServer) -> None:
        nonlocal has_started
        has_started = True
        log.name = f"penstock worker {short_id(server.worker_id)}"
        log.say(f"listens at {_where(server, spec)}, process {os.getpid()}")

    try:
        run_worker(spec, started, log.tell, log.say)
    except (PenstockError, ValueError, OSError, MemoryError) as error:
        log.tell(str(error) or type(error).__name__)
        # Of a worker that serves its native thread knows whether another would fare better.
        if not has_started and not is_shortage(error):
            _pool.write_exit_line(spec.exit_fd, "useless")
        return 1
    except BaseException as error:
        if os.getpid() == pid:  # and this is no child that a dataset has forked
            _pool.write_exit_line(spec.exit_fd, "failed", f"{type(error).__name__}: {error}")
        raise
    return 0


def _where(server: _C.PoolServer, spec: PoolWorkerSpec) -> str:
    where = _shown(server.endpoint, server.advertised)
    data = _shown(server.data_endpoint, server.data_advertised)
    return f"{where} and for batches at {data} for {spec.controller}, id {server.worker_id:016x}"


def _shown(bound: str, advertised: str) -> str:
    return bound if bound == advertised else f"{bound} (which trainers reach at {advertised})"
