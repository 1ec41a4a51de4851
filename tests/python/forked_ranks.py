# SPDX-License-Identifier: Apache-2.0
"""Ranks of a gloo group as forks of one process, which has imported torch once for all of them.

They meet in a real TCPStore on the loopback interface, which rank 0 serves. For use in a program
that has started no threads, and not in the test process.
"""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

SECONDS_MAX = 60.0


def run_ranks(
    world_size: int, body: Callable[[int], None], log: Path, seconds_max: float = SECONDS_MAX
) -> list[int]:
    """Call ``body(rank)`` in each rank. Returns the exit codes, as from
    ``os.waitstatus_to_exitcode``. ``log`` receives their standard error.

    When a rank has failed, or the time is over, the others are killed, as torchrun does.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        pids = [_fork(rank, world_size, body, listener, log) for rank in range(world_size)]
    return _wait(pids, time.monotonic() + seconds_max)


def _fork(
    rank: int, world_size: int, body: Callable[[int], None], listener: socket.socket, log: Path
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        port = listener.getsockname()[1]
        if rank:
            listener.close()
        timeout = datetime.timedelta(seconds=SECONDS_MAX)
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=listener.detach() if rank == 0 else None,
        )
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        body(rank)
        dist.barrier()  # rank 0 has the store, and leaves last
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], deadline: float) -> list[int]:
    codes: dict[int, int] = {}
    watched = {os.pidfd_open(pid): pid for pid in pids}
    while watched:
        is_over = time.monotonic() > deadline or any(codes.values())
        if is_over:
            for pid in watched.values():
                os.kill(pid, signal.SIGKILL)
        left_s = max(0.0, deadline - time.monotonic())
        for fd in select.select([*watched], [], [], None if is_over else left_s)[0]:
            pid = watched.pop(fd)
            os.close(fd)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]
