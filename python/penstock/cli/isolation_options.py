# SPDX-License-Identifier: Apache-2.0
"""The options that isolate the processes of jobs, for each command that starts workers."""

from __future__ import annotations

import argparse
import re

from penstock.cli.command_parser import CommandParser, did_you_mean, whole_number
from penstock.pool.job_hosts import parse_named
from penstock.pool.job_isolation import LEVELS, IsolationOptions

_UIDS_MAX = 2**32 - 2


def add_isolation(parser: CommandParser) -> None:
    parser.add_argument(
        "--isolate",
        type=_levels,
        metavar="LEVELS",
        help="what jobs are kept from, with commas between: keys (the folder of keys), files "
        "(writing outside of their own folders), tmp (/tmp, /var/tmp and /dev/shm of others), "
        "network, user (each job has an account of its own, see --job-uids); or none. Keys are in "
        "each of them. What is named and cannot be had is an error (default: keys, with a warning "
        "where that cannot be had)",
    )
    parser.add_argument(
        "--job-writes",
        type=_folders,
        default=(),
        metavar="DIR[:DIR]",
        help="with --isolate files: further folders that jobs may write in",
    )
    parser.add_argument(
        "--job-hosts",
        type=_hosts,
        default=(),
        metavar="HOST:PORT[,...]",
        help="with --isolate network: what jobs may reach all the same, by an HTTP proxy that "
        "HTTPS_PROXY and HTTP_PROXY name in their environment; *.NAME:PORT covers each name below "
        "it, and a service of this machine is named by its address",
    )
    parser.add_argument(
        "--job-uids",
        type=_uids,
        metavar="FIRST-LAST",
        help="with --isolate user: uids that nobody else has; each job takes one that is free",
    )
    parser.add_argument(
        "--job-memory",
        type=whole_number(1 << 20, 1 << 50),
        metavar="BYTES",
        help="memory of a job, by cgroup v2 with --job-group, else of each of its processes, by "
        "RLIMIT_DATA (default: no bound)",
    )
    parser.add_argument(
        "--job-files",
        type=whole_number(64, 1 << 20),
        metavar="N",
        help="files that a process of a job may have open (default: as many as the worker)",
    )
    parser.add_argument(
        "--job-processes",
        type=whole_number(1, 1 << 22),
        metavar="N",
        help="processes and threads of a job, by cgroup v2 with --job-group, else those of the "
        "account, by RLIMIT_NPROC (default: no bound)",
    )
    parser.add_argument(
        "--job-group",
        metavar="DIR",
        help="folder of cgroup v2 that is delegated to the worker; each job has a group in it",
    )
    parser.add_argument(
        "--job-cpu-weight",
        type=whole_number(1, 10_000),
        metavar="N",
        help="with --job-group: weight of a job among others that want CPUs (default: 100)",
    )


def isolation_of(args: argparse.Namespace) -> IsolationOptions:
    """Return the isolation requested by the options of :func:`add_isolation`."""
    return IsolationOptions(
        levels=args.isolate,
        job_writes=args.job_writes,
        job_hosts=args.job_hosts,
        job_uids=args.job_uids,
        job_memory=args.job_memory,
        job_files=args.job_files,
        job_processes=args.job_processes,
        job_group=args.job_group,
        job_cpu_weight=args.job_cpu_weight,
    )


def isolation_arguments(options: IsolationOptions) -> list[str]:
    """Return the arguments that pass these options to another command."""
    uids = options.job_uids
    given = {
        "isolate": None if options.levels is None else ",".join(sorted(options.levels)) or "none",
        "job-writes": ":".join(options.job_writes) or None,
        "job-hosts": ",".join(options.job_hosts) or None,
        "job-uids": None if uids is None else f"{uids[0]}-{uids[1]}",
        "job-memory": options.job_memory,
        "job-files": options.job_files,
        "job-processes": options.job_processes,
        "job-group": options.job_group,
        "job-cpu-weight": options.job_cpu_weight,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _levels(text: str) -> frozenset[str]:
    if text == "none":
        return frozenset()
    names = text.split(",")
    for name in names:
        if name not in LEVELS:
            meant = did_you_mean(name, LEVELS) or f"; {', '.join(LEVELS)} are expected, or none"
            raise argparse.ArgumentTypeError(f"has {name!r}{meant}")
    return frozenset(names)


def _folders(text: str) -> tuple[str, ...]:
    folders = tuple(text.split(":"))
    if not all(folder.startswith("/") for folder in folders):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; absolute paths of folders are expected, with ':' between them"
        )
    return folders


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return tuple(parse_named(host) for host in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"is {text!r}, where {error}; HOST:PORT is expected, with commas between several, such "
            f"as data.example.org:443,*.example.com:443,127.0.0.1:9000"
        ) from None


def _uids(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,10})-(\d{1,10})", text)
    if found is not None and 0 < int(found[1]) <= int(found[2]) <= _UIDS_MAX:
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(
        f"is {text!r}; two uids above 0 are expected, such as 70000-70099"
    )
