# SPDX-License-Identifier: Apache-2.0
"""The processes of a pool's worker behind its server, by the id of the server, which is the process
that others know as the worker: the warm process, and those of jobs, which are forked from it.
"""

from __future__ import annotations

from process_traces import children, is_running


def warm_process(server: int) -> int | None:
    return next(filter(is_running, children(server)), None)


def job_process(server: int) -> int | None:
    """The one that was forked last: those before it are on their way out."""
    warm = warm_process(server)
    running = [] if warm is None else [*filter(is_running, children(warm))]
    return running[-1] if running else None


def all_processes(server: int) -> list[int]:
    """With the server."""
    warm = children(server)
    return [server, *warm, *(job for pid in warm for job in children(pid))]
