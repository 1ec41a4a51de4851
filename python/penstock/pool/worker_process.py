# SPDX-License-Identifier: Apache-2.0
"""One of the processes that `penstock worker` starts."""

from __future__ import annotations

import os

from penstock import _C
from penstock.errors import PenstockError
from penstock.pool.pool_log import PoolLog, short_id
from penstock.pool.pool_worker import run_worker
from penstock.pool.worker_spec import USELESS_EXIT_CODE, PoolWorkerSpec


def run_child(settings: dict[str, object]) -> int:
    """Serves as the settings of a `PoolWorkerSpec` say; returns the exit code."""
    spec = PoolWorkerSpec(**settings)  # type: ignore[arg-type]
    log = PoolLog("penstock worker", is_quiet=spec.is_quiet)

    def started(server: _C.PoolServer) -> None:
        log.name = f"penstock worker {short_id(server.worker_id)}"
        log.say(f"listens at {_where(server, spec)}, process {os.getpid()}")

    try:
        run_worker(spec, started, log.tell, log.say)
    except (PenstockError, ValueError, OSError) as error:
        log.tell(str(error))
        return USELESS_EXIT_CODE
    return 0


def _where(server: _C.PoolServer, spec: PoolWorkerSpec) -> str:
    where = _shown(server.endpoint, server.advertised)
    data = _shown(server.data_endpoint, server.data_advertised)
    return f"{where} and for batches at {data} for {spec.controller}, id {server.worker_id:016x}"


def _shown(bound: str, advertised: str) -> str:
    return bound if bound == advertised else f"{bound} (which trainers reach at {advertised})"
