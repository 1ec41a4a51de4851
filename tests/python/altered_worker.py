# SPDX-License-Identifier: Apache-2.0
"""A pool worker with one alteration in its processes, like a host that was broken into or
misconfigured.

    python altered_worker.py ALTERATION ARGUMENT CONTROLLER KEYS [OPTION ...]

It runs the real penstock with the worker's real key. ALTERATION is one of worker_alterations.py.
The options are the isolation options of `penstock worker`.
"""

from __future__ import annotations

import os
import sys

from penstock.cli.command_parser import CommandParser
from penstock.cli.isolation_options import add_isolation, isolation_of
from penstock.pool import worker_supervisor
from penstock.pool.job_isolation import plan_isolation
from penstock.pool.worker_spec import PoolWorkerSpec
from penstock.pool.worker_supervisor import Supervisor

# Runs before the program imports the altered code.
_ALTER = """\
from worker_alterations import ALTERATIONS
ALTERATIONS[{name!r}]({argument!r})
from penstock.pool.warm_process"""


if __name__ == "__main__":
    name, argument, controller, keys, *options = sys.argv[1:]
    parser = CommandParser("worker", "worker", "")
    add_isolation(parser)
    program = worker_supervisor._WARM_PROGRAM
    altered = _ALTER.format(name=name, argument=argument)
    worker_supervisor._WARM_PROGRAM = program.replace("from penstock.pool.warm_process", altered)
    spec = PoolWorkerSpec(
        bind="tcp://127.0.0.1:0",
        advertised=None,
        data_bind=None,
        data_advertised=None,
        controller=controller,
        key_folder=keys or None,
        patience_s=60.0,
        parent_pid=os.getpid(),
    )
    plan = plan_isolation(isolation_of(parser.parse(options)), spec.key_folder)
    sys.exit(Supervisor([spec], isolation=plan.isolation).run())
