# SPDX-License-Identifier: Apache-2.0
"""Set up a process that makes batches of a pool's jobs, for any parent process."""

from __future__ import annotations

import platform
import random
import signal
import socket

import numpy as np
import torch

from penstock._version import __version__
from penstock.compat.iterators import torch_collate
from penstock.pool.pool_status import spoken_numerics
from penstock.pool.process_settings import ProcessState


def load_what_is_loaded_late() -> None:
    """Call functions that import or build something at their first call, so that this is done
    before a job, and before a fork."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch_collate.default_collate([(torch.zeros(2), np.zeros(2), 0, 0.0, "")] * 2)
    ProcessState.now()


def ignore_end_signals() -> None:
    """Make SIGTERM and SIGINT have no effect here: the end of this process is requested in another
    way. They have a handler and are not ignored, because programs that a dataset starts would
    inherit ignored signals.

    Call this after `worker_process.set_up_process`, since torch installs a SIGTERM handler, and
    again if a job's modules may have replaced these handlers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not _do_nothing:
            signal.signal(number, _do_nothing)


def _do_nothing(*_: object) -> None:
    pass


def about_worker(pid: int) -> str:
    """Describe a worker for people by its process and the versions that it makes batches with."""
    return (
        f"{socket.gethostname()}, process {pid}, penstock {__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {spoken_numerics()}"
    )
