# SPDX-License-Identifier: Apache-2.0
"""Says so when a killed worker was killed for want of memory.

Torch reports the signal. The kernel counts the processes that it killed because memory ran out, of
a container or of the machine, as ``oom_kill`` in /proc/vmstat (since Linux 4.13).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.seams.iterators import SIGNAL_MODULE

_KILLED = "is killed by signal: Killed"

# As the workers of the newest iterator started. Kills before that are no explanation.
_kills_before = 0


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it
    does not say.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def explain_later_kills() -> None:
    """Called when workers start: errors about killed ones are explained from now on, those included
    that torch's handler of SIGCHLD raises wherever the trainer happens to be.
    """
    global _kills_before
    _kills_before = oom_kills()
    handler = signal.getsignal(signal.SIGCHLD)
    is_torchs = getattr(handler, "__module__", None) == SIGNAL_MODULE
    if is_torchs and callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _explaining(handler))


def explain(error: RuntimeError) -> RuntimeError:
    """The error itself, with the reason added to its text if it is about a worker that was killed
    and memory ran out meanwhile.
    """
    text = str(error)
    count = oom_kills() - _kills_before if _KILLED in text else 0
    if count > 0 and "memory ran out" not in text:
        processes = "a process" if count == 1 else f"{count} processes"
        error.args = (
            f"{text.rstrip()} The kernel has killed {processes} because memory ran out since this "
            f"loader started its workers, most likely this one. Fewer workers, a smaller "
            f"prefetch_factor or prefetch_bytes need less memory.",
        )
    return error


def _explaining(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    def handle(number: int, frame: Any) -> Any:
        try:
            return handler(number, frame)
        except RuntimeError as error:
            raise explain(error) from None

    return handle
