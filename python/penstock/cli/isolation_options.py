# SPDX-License-Identifier: Apache-2.0
"""The options that isolate the processes of jobs, for each command that starts workers."""

from __future__ import annotations

import argparse
import re

from penstock.cli.command_parser import CommandParser, did_you_mean, integer
from penstock.pool.job_isolation import LEVELS, IsolationOptions, parse_named

_UIDS_MAX = 2**32 - 2


def add_isolation(parser: CommandParser) -> None:
    parser.add_argument(
        "--isolate",
        type=_levels,
        metavar="LEVELS",
        help="accesses to deny to jobs, separated by commas: keys (the key folder), files "
        "(writing outside their own folders), tmp (the shared /tmp, /var/tmp and /dev/shm), "
        "network, user (each job runs under a separate account, see --job-uids); or none. Each of "
        "them includes keys. A level that is given but unavailable is an error (default: keys, "
        "with a warning if unavailable)",
    )
    parser.add_argument(
        "--job-writes",
        type=_folders,
        default=(),
        metavar="DIR[:DIR]",
        help="with --isolate files: additional folders that jobs may write to",
    )
    parser.add_argument(
        "--job-hosts",
        type=_hosts,
        default=(),
        metavar="HOST:PORT[,...]",
        help="with --isolate network: hosts that jobs may still reach, through an HTTP proxy that "
        "HTTPS_PROXY and HTTP_PROXY name in their environment; *.NAME:PORT covers each name below "
        "NAME; name services on this machine by address",
    )
    parser.add_argument(
        "--job-uids",
        type=_uids,
        metavar="FIRST-LAST",
        help="with --isolate user: range of uids reserved for jobs; each job gets a free one",
    )
    parser.add_argument(
        "--job-memory",
        type=integer(1 << 20, 1 << 50),
        metavar="BYTES",
        help="memory limit of a job, by cgroup v2 with --job-group, else of each of its "
        "processes, by RLIMIT_DATA (default: unlimited)",
    )
    parser.add_argument(
        "--job-files",
        type=integer(64, 1 << 20),
        metavar="N",
        help="maximum number of open files per job process (default: same as the worker)",
    )
    parser.add_argument(
        "--job-processes",
        type=integer(1, 1 << 22),
        metavar="N",
        help="maximum number of processes and threads of a job, by cgroup v2 with --job-group, "
        "else of the account, by RLIMIT_NPROC (default: unlimited)",
    )
    parser.add_argument(
        "--job-group",
        metavar="DIR",
        help="cgroup v2 folder that is delegated to the worker; each job gets a group in it",
    )
    parser.add_argument(
        "--job-cpu-weight",
        type=integer(1, 10_000),
        metavar="N",
        help="with --job-group: CPU weight of a job relative to others (default: 100)",
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
            meant = did_you_mean(name, LEVELS) or f"; levels are {', '.join(LEVELS)}, or none"
            raise argparse.ArgumentTypeError(f"contains the unknown level {name!r}{meant}")
    return frozenset(names)


def _folders(text: str) -> tuple[str, ...]:
    folders = tuple(text.split(":"))
    if not all(folder.startswith("/") for folder in folders):
        raise argparse.ArgumentTypeError(
            f"must be absolute paths of folders, separated by ':', got {text!r}"
        )
    return folders


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return tuple(parse_named(host) for host in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            "must be HOST:PORT entries separated by commas, such as "
            f"data.example.org:443,*.example.com:443,127.0.0.1:9000, got {text!r}, where {error}"
        ) from None


def _uids(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,10})-(\d{1,10})", text)
    if found is not None and 0 < int(found[1]) <= int(found[2]) <= _UIDS_MAX:
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(f"must be two uids above 0, such as 70000-70099, got {text!r}")
