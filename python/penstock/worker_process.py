# SPDX-License-Identifier: Apache-2.0
"""One of the processes that `penstock worker` starts."""

from __future__ import annotations

import os

from penstock import _C
from penstock.errors import PenstockError
from penstock.pool_log import say, tell
from penstock.pool_worker import run_worker
from penstock.worker_spec import USELESS_EXIT_CODE, PoolWorkerSpec


def run_child(settings: dict[str, object]) -> int:
    """Serves as the settings of a `PoolWorkerSpec` say; returns the exit code."""
    spec = PoolWorkerSpec(**settings)  # type: ignore[arg-type]
    try:
        run_worker(spec, lambda server: _say_where(server, spec), tell)
    except (PenstockError, ValueError, OSError) as error:
        tell(str(error))
        return USELESS_EXIT_CODE
    return 0


def _say_where(server: _C.PoolServer, spec: PoolWorkerSpec) -> None:
    where = server.endpoint
    if server.advertised != where:
        where += f" (which trainers reach at {server.advertised})"
    say(f"{server.worker_id:016x} listens at {where} for {spec.controller}, process {os.getpid()}")
