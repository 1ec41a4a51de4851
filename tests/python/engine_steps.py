# SPDX-License-Identifier: Apache-2.0
"""An adapter of local processes that kills itself with SIGKILL at a given step.

usage: engine_steps.py CONTROLLER FOLDER MAX STEP

There is a step before and after each call that changes the set of workers. With STEP 0 it never
kills itself. It prints the number of steps when SIGTERM ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from penstock.engines.adapter import Adapter, AdapterLimits
from penstock.engines.engine import WorkerCommand
from penstock.engines.journal import Journal
from penstock.engines.local_engine import LocalEngine

_DEADLY = int(sys.argv[4])
# The records of the pool's cost do not count: they are written only now and then.
_COUNTED = {"take_names", "note_stop", "note_gone", "spawn", "stop"}
_step_count = 0


def _step() -> None:
    global _step_count
    _step_count += 1
    if _step_count == _DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)


class Stepping:
    """Forwards calls to another object, with a step before and after each."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in _COUNTED:
            return value

        def stepped(*args: Any, **options: Any) -> Any:
            _step()
            result = value(*args, **options)
            _step()
            return result

        return stepped


def main() -> None:
    controller, folder, most = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    journal = Journal(folder / "journal")
    engine = LocalEngine(WorkerCommand(controller, None, 20.0), f"{journal.pool}-", folder / "logs")
    limits = AdapterLimits(worker_count_min=most, worker_count_max=most, idle_s=1.0, grace_s=20.0)
    stepping: Any = Stepping(journal)
    adapter = Adapter(Stepping(engine), stepping, limits, controller, None, print)
    is_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: is_to_end.append(1))
    print("begins", flush=True)
    while adapter.run_once(is_to_end=bool(is_to_end)):
        time.sleep(0.1)
    print(f"steps {_step_count}", flush=True)


main()
