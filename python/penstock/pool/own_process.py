# SPDX-License-Identifier: Apache-2.0
"""A worker process that a C++ trainer starts for a Python dataset: ``python -m
penstock.pool.own_process``.

It serves like a pool worker, on loopback, and is one of the trainer's local workers.
"""

from __future__ import annotations

import argparse
import os
import sys

from penstock import _C
from penstock.errors import PenstockError
from penstock.pool.job_code import CodeFolder
from penstock.pool.pool_worker import run_worker
from penstock.pool.worker_spec import PoolWorkerSpec


def main() -> int:
    """Serve until the trainer ends or drains this worker. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock.pool.own_process")
    parser.add_argument("--handover", required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()

    def started(server: _C.PoolServer) -> None:
        os.write(args.report_fd, f"{server.worker_id} {server.endpoint}\n".encode())
        os.close(args.report_fd)

    code = CodeFolder()
    spec = PoolWorkerSpec.of_trainer(args.parent, args.handover)
    try:
        run_worker(spec, code.path, started, lambda text: print(text, file=sys.stderr))
    except (PenstockError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        code.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
