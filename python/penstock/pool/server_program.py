# SPDX-License-Identifier: Apache-2.0
"""Build the command of the server of a machine's workers: a program without Python and torch, which
has the workers' keys and sockets. It starts their warm process itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock import _pool
from penstock.errors import PenstockError
from penstock.pool.job_isolation import IsolationOptions, JobIsolation, plan_isolation
from penstock.pool.worker_spec import PoolWorkerSpec
from penstock.worker.arena_cap import arena_bytes, job_bytes

# The warm process gets the parent's module path, so it finds modules in any folder. The server
# appends the descriptor of its channel to the arguments. The process exits without cleanup, since
# the system is faster at it.
_WARM_PROGRAM = """\
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.warm_process import run_warm
os._exit(run_warm(json.loads(sys.argv[2]), int(sys.argv[3])))
"""


class ServerProgram:
    """The program, and the settings that all servers of one supervisor share."""

    def __init__(self, *, is_quiet: bool, isolation: JobIsolation | None = None) -> None:
        """A quiet worker logs only problems. Without ``isolation``, jobs are isolated from the
        keys if possible. Raises PenstockError if the program is missing, and ValueError if an
        environment variable for a memory cap is invalid."""
        self._path = _path_of_program()
        self._is_quiet = is_quiet
        self._isolation = isolation
        self._caps = {"arena-bytes": arena_bytes(), "blob-bytes": job_bytes()}

    def command(self, specs: Sequence[PoolWorkerSpec], code_root: str, exit_fd: int) -> list[str]:
        """Return the command of a server with a worker for each of ``specs``, which differ only in
        their addresses. ``code_root`` is a folder for the modules of jobs, which the caller
        removes; ``exit_fd`` is the write end of its ExitPipe."""
        addresses = [
            (name, value)
            for spec in specs
            for name, value in (
                ("bind", spec.bind),
                ("advertised", spec.advertised),
                ("data-bind", spec.data_bind),
                ("data-advertised", spec.data_advertised),
            )
        ]
        spec = specs[0]
        options = {
            "controller": spec.controller,
            "keys": spec.key_folder,
            "name": spec.name,
            "powercap": spec.powercap,
            "patience": spec.patience_s,
            "grace": spec.grace_s,
            "parent": spec.parent_pid,
            "exit-fd": exit_fd,
            "quiet": int(self._is_quiet),
            **self._caps,
        }
        given = (
            f"--{name}={value}"
            for name, value in (*addresses, *options.items())
            if value is not None
        )
        if self._isolation is None:
            self._isolation = plan_isolation(IsolationOptions(), spec.key_folder).isolation
        of_warm = {
            "code_root": code_root,
            "is_quiet": self._is_quiet,
            "isolation": self._isolation.fields(),
        }
        warm = (sys.executable, "-c", _WARM_PROGRAM, json.dumps(sys.path), json.dumps(of_warm))
        return [str(self._path), *given, "--", *warm]


def _path_of_program() -> Path:
    assert _pool.__file__ is not None
    path = Path(_pool.__file__).with_name("penstock-server")
    if not os.access(path, os.X_OK):
        raise PenstockError(
            f"the program that serves trainers of a pool, {path}, is not there or cannot be run; "
            f"install penstock again, or build it again where this is a source tree"
        )
    return path
