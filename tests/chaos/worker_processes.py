# SPDX-License-Identifier: Apache-2.0
"""The processes of `penstock worker`, by what they are: the supervisor, which is the command; the
servers, which are what others know as workers; the warm processes; and those of jobs, which are
forked from a warm one. Found as children of each other, however many workers a server has.
"""

from __future__ import annotations

from process_traces import children, is_running, name_of

SERVER_NAME = "penstock-server"


def servers(supervisor: int) -> list[int]:
    return [pid for pid in children(supervisor) if is_running(pid) and name_of(pid) == SERVER_NAME]


def warm_processes(server: int) -> list[int]:
    return [*filter(is_running, children(server))]


def job_processes(server: int, count: int = 1) -> list[int]:
    """Those that were forked last, one for each of so many workers: those before them are on their
    way out."""
    jobs = (job for warm in warm_processes(server) for job in children(warm))
    return [*filter(is_running, jobs)][-count:]


def all_processes(supervisor: int) -> list[int]:
    """Below the supervisor, with what a dataset has started."""
    found = [*children(supervisor)]
    for pid in found:  # which grows meanwhile
        found += children(pid)
    return found
