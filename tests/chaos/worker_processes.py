# SPDX-License-Identifier: Apache-2.0
"""The processes of `penstock worker`, by kind: the supervisor, which is the command; the servers,
which other processes know as workers; the warm processes; and the job processes, which are forked
from a warm one. Found as children of each other, for any number of workers per server.
"""

from __future__ import annotations

from process_traces import children, is_running, name_of

SERVER_NAME = "penstock-server"


def servers(supervisor: int) -> list[int]:
    return [pid for pid in children(supervisor) if is_running(pid) and name_of(pid) == SERVER_NAME]


def warm_processes(server: int) -> list[int]:
    return [*filter(is_running, children(server))]


def job_processes(server: int, count: int = 1) -> list[int]:
    """The processes that were forked last, one for each of so many workers: earlier ones are
    exiting."""
    jobs = (job for warm in warm_processes(server) for job in children(warm))
    return [*filter(is_running, jobs)][-count:]


def all_processes(supervisor: int) -> list[int]:
    """Below the supervisor, including processes that a dataset has started."""
    found = [*children(supervisor)]
    for pid in found:  # which grows meanwhile
        found += children(pid)
    return found
