# SPDX-License-Identifier: Apache-2.0
"""Isolate job processes from keys, files, the network and each other: the operator's options, and
the machine's capabilities. job_place.py sets up each job.

csrc/base/job_separation.h describes the mechanisms. The process that starts workers does not load
torch, so this module does not either.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penstock import _pool
from penstock.errors import PenstockError

LEVELS = ("keys", "files", "tmp", "network", "user")
_HOST_PART = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"  # a part of a name; bucket names may have _
_HOST_NAME = re.compile(rf"{_HOST_PART}(?:\.{_HOST_PART})*")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[^][:@/?#\s]{1,253}):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class IsolationOptions:
    """The options as the operator gives them."""

    levels: frozenset[str] | None = None  # None: keys, if possible; empty: no levels
    job_writes: tuple[str, ...] = ()
    job_hosts: tuple[str, ...] = ()  # as parse_named() returns them
    job_uids: tuple[int, int] | None = None  # the first and the last
    job_memory: int | None = None  # bytes
    job_files: int | None = None
    job_processes: int | None = None
    job_group: str | None = None
    job_cpu_weight: int | None = None


@dataclass(frozen=True, slots=True)
class JobIsolation:
    """The isolation that each job process applies to itself. The warm process gets it as JSON."""

    hiding: Literal["mounts", "rules", ""] = ""
    hidden: Sequence[str] = ()  # folders of keys
    has_private_tmp: bool = False
    kept: Sequence[str] = ()  # folders that a job needs, which stay accessible
    are_writes_bounded: bool = False
    writable: Sequence[str] = ()
    no_network: Literal["namespace", "filter", ""] = ""
    hosts: Sequence[str] = ()  # that are still reached, by a proxy, from a namespace
    uids: Sequence[int] = ()  # the first and the last
    data_bytes: int | None = None
    descriptor_count: int | None = None
    process_count: int | None = None
    group: str = ""
    group_settings: dict[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the constructor's arguments as values that JSON can represent."""
        return asdict(self)

    def separation(
        self, private: str = "", folder: str = "", uid: int | None = None
    ) -> _pool.JobSeparation:
        """Return the separation of a job with a ``private`` temporary folder, and a ``folder`` for
        its modules."""
        own = [path for path in (folder, private) if path]
        return _pool.JobSeparation(
            hiding=self.hiding,
            hidden=self.hidden,
            private_tmp=private if self.has_private_tmp else "",
            kept=[*self.kept, *self.writable, *own],
            are_writes_bounded=self.are_writes_bounded,
            writable=[*self.writable, *own],
            no_network=self.no_network,
            has_loopback=self.no_network == "namespace" and bool(self.hosts),
            uid=uid,
            data_bytes=self.data_bytes,
            descriptor_count=self.descriptor_count,
            process_count=self.process_count,
        )

    @property
    def has_folder(self) -> bool:
        """Whether each job has a private temporary folder."""
        return (
            self.has_private_tmp
            or self.are_writes_bounded
            or self.hiding == "rules"
            or bool(self.uids)
        )


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    isolation: JobIsolation
    messages: list[str]  # how the requested isolation is implemented
    warnings: list[str]  # what remains unprotected


def plan_isolation(options: IsolationOptions, key_folder: str | None) -> IsolationPlan:
    """Try the isolation that ``options`` request. Without ``key_folder``, workers use the shared
    keys.

    Raise ValueError if isolation that was requested by name is not available.
    """
    _check(options)
    levels = options.levels
    named = levels or frozenset()
    messages: list[str] = []
    warnings: list[str] = []
    plan = JobIsolation(
        kept=_folders_of_python(),
        writable=[os.path.realpath(path) for path in options.job_writes],
        descriptor_count=options.job_files,
    )
    if "user" in named:
        plan = replace(plan, uids=_tried_uids(plan, options))
    if "tmp" in named:
        plan = _tried(replace(plan, has_private_tmp=True), "tmp")
    if "files" in named:
        plan = _tried(replace(plan, are_writes_bounded=True), "files")
    if "network" in named:
        plan, how = _tried_network(replace(plan, hosts=options.job_hosts))
        reached = f" except {', '.join(plan.hosts)} through a proxy" if plan.hosts else ""
        messages.append(f"jobs have no network{reached}, enforced by {how}")
    if levels is None or levels:
        plan, added, trouble = _tried_keys(plan, key_folder, is_named="keys" in named)
        if trouble and "keys" in named:
            raise _cannot("keys", trouble)
        messages += added
        warnings += [f"jobs are not kept from the keys: {trouble}"] if trouble else []
    plan, added = _limited(plan, options)
    messages += added
    if named and os.geteuid() == 0 and "user" not in named:
        warnings.append(
            "jobs run as root, and can read disks and change files of root; run the worker under "
            "another account, or name user in --isolate"
        )
    return IsolationPlan(plan, messages, warnings)


def _check(options: IsolationOptions) -> None:
    named = options.levels or frozenset()
    for is_given, name, level in (
        (bool(options.job_writes), "--job-writes", "files"),
        (bool(options.job_hosts), "--job-hosts", "network"),
        (options.job_uids is not None, "--job-uids", "user"),
    ):
        if is_given and level not in named:
            raise ValueError(f"{name} requires --isolate {level}; add {level} to --isolate")
    if "user" in named and options.job_uids is None:
        raise ValueError(
            "--isolate user requires --job-uids FIRST-LAST; name uids that are not in use"
        )
    if options.job_cpu_weight is not None and options.job_group is None:
        raise ValueError(
            "--job-cpu-weight requires --job-group; name a folder of cgroup v2 for the groups"
        )
    for path in options.job_writes:
        if not os.path.isdir(path):
            raise ValueError(f"--job-writes must name existing folders, got {path}; create it")


def _cannot(level: str, why: str) -> ValueError:
    return ValueError(
        f"--isolate must name levels that this machine supports, got {level}: {why}; leave {level} "
        f"out, or enable it"
    )


def _tried(plan: JobIsolation, level: str) -> JobIsolation:
    if why := _refusal(plan):
        raise _cannot(level, why)
    return plan


def _refusal(plan: JobIsolation, needed: Sequence[str] = ()) -> str:
    uid = plan.uids[0] if plan.uids else None
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as folder:
        return plan.separation(folder, uid=uid).refusal(needed)


def _tried_uids(plan: JobIsolation, options: IsolationOptions) -> list[int]:
    uids = options.job_uids or (0, 0)
    if os.geteuid() != 0:
        raise _cannot("user", "only root can start processes under other accounts")
    why = _refusal(replace(plan, uids=uids), [path for path in plan.kept if os.path.isdir(path)])
    if why:
        raise _cannot("user", why)
    return list(uids)


def _tried_network(plan: JobIsolation) -> tuple[JobIsolation, str]:
    apart = replace(plan, no_network="namespace")
    if not (why := _refusal(apart)):
        return apart, "a network namespace"
    if plan.hosts:
        raise ValueError(
            f"--job-hosts requires a network namespace, which this machine does not support: "
            f"{why}; enable it, or leave --job-hosts out"
        )
    filtered = replace(plan, no_network="filter")
    if not (why_no_filter := _refusal(filtered)):
        return filtered, f"a filter of system calls ({why})"
    raise _cannot("network", f"{why}; {why_no_filter}")


def _tried_keys(
    plan: JobIsolation, key_folder: str | None, *, is_named: bool
) -> tuple[JobIsolation, list[str], str]:
    """Return the plan with hidden keys, a line for the log, and the reason if keys stay visible."""
    if key_folder is None:
        try:
            key_folder = _pool.shared_key_folder()
        except PenstockError:  # the worker's server reports it
            return plan, [], ""
    folder = os.path.realpath(key_folder)

    def hidden(hiding: Literal["mounts", "rules", ""]) -> JobIsolation:
        return replace(plan, hiding=hiding, hidden=[folder])

    hiding, notice, trouble = _pool.choose_key_hiding(
        folder,
        needed=plan.kept,
        is_demanded=is_named,
        way_to_demand="name keys in --isolate",
        refusal=lambda hiding: _refusal(hidden(hiding)),
    )
    return hidden(hiding) if hiding else plan, [notice] if notice else [], trouble


def _limited(plan: JobIsolation, options: IsolationOptions) -> tuple[JobIsolation, list[str]]:
    messages = []
    settings: dict[str, str] = {}
    wanted: set[str] = set()
    has = set() if options.job_group is None else _controllers_of(options.job_group)
    if options.job_memory is not None:
        if "memory" in has:
            wanted.add("memory")
            settings |= {"memory.max": str(options.job_memory), "memory.oom.group": "1"}
            messages.append("the memory of each job is bounded by memory.max of its group")
        else:
            plan = replace(plan, data_bytes=options.job_memory)
            messages.append(
                "the memory of each process of a job is bounded by RLIMIT_DATA, which leaves out "
                "shared memory and files; " + _no_controller(options, "memory")
            )
    if options.job_processes is not None:
        if "pids" in has:
            wanted.add("pids")
            settings["pids.max"] = str(options.job_processes)
            messages.append("the processes of each job are bounded by pids.max of its group")
        elif os.geteuid() == 0 and not plan.uids:
            raise ValueError(
                "--job-processes requires --isolate user, or a --job-group that has the controller "
                "pids, if the worker runs as root, which RLIMIT_NPROC does not bound; add one of "
                "them"
            )
        else:
            plan = replace(plan, process_count=options.job_processes)
            messages.append(
                "the processes of jobs are bounded by RLIMIT_NPROC, which counts all processes and "
                "threads of the account; " + _no_controller(options, "pids")
            )
    if options.job_cpu_weight is not None:
        if "cpu" not in has:
            raise ValueError(
                f"--job-cpu-weight requires a --job-group that has the controller cpu, got "
                f"{options.job_group}; delegate this controller, too"
            )
        wanted.add("cpu")
        settings["cpu.weight"] = str(options.job_cpu_weight)
    if options.job_group is not None:
        folder = os.path.realpath(options.job_group)
        _enable_controllers(folder, wanted)
        plan = replace(plan, group=folder, group_settings=settings)
    return plan, messages


def _no_controller(options: IsolationOptions, name: str) -> str:
    if options.job_group is None:
        return "--job-group bounds the whole job"
    return f"{options.job_group} has no controller {name}"


def _folders_of_python() -> list[str]:
    found = {os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path}
    return sorted(path for path in found if os.path.isdir(path))


def _controllers_of(folder: str) -> set[str]:
    """Return the controllers available to groups below ``folder``. Raise ValueError if it is not a
    cgroup v2 folder in which groups can be created."""
    try:
        names = Path(folder, "cgroup.controllers").read_text().split()
    except OSError as error:
        raise ValueError(
            f"--job-group must be a folder of cgroup v2, got {folder} ({error.strerror}); make one "
            f"below /sys/fs/cgroup, or have systemd delegate one (Delegate=yes)"
        ) from None
    if not os.access(folder, os.W_OK) or not os.access(f"{folder}/cgroup.procs", os.W_OK):
        raise ValueError(
            f"--job-group must be a folder that this account may write, got {folder}; delegate it "
            f"(Delegate=yes of a systemd unit, or chown it and its cgroup.procs)"
        )
    return set(names)


def _enable_controllers(folder: str, controllers: set[str]) -> None:
    """Enable these controllers for groups below ``folder``. Raise ValueError if that is refused."""
    try:
        if controllers:
            text = " ".join(f"+{name}" for name in sorted(controllers))
            Path(folder, "cgroup.subtree_control").write_text(text)
        trial = os.path.join(folder, f"penstock-{os.getpid()}-0")
        os.mkdir(trial)
        os.rmdir(trial)
    except OSError as error:
        raise ValueError(
            f"--job-group must be a folder in which groups can be made, got {folder} "
            f"({error.strerror}); it must contain no processes, and be delegated to this account"
        ) from None


@dataclass(frozen=True, slots=True)
class JobHost:
    """A host and a port. ``name`` is in lower case; an address is in its canonical form."""

    name: str
    port: int
    is_address: bool = False

    @staticmethod
    def parse(text: str) -> JobHost:
        """Parse HOST:PORT. Raise ValueError."""
        found = _AUTHORITY.fullmatch(text)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise ValueError(f"expected HOST:PORT, got {text!r}")
        name = found[1].removeprefix("[").removesuffix("]").removesuffix(".").lower()
        try:
            return JobHost(str(ipaddress.ip_address(name)), int(found[2]), is_address=True)
        except ValueError:
            # If the last part is a number, the system may parse the name as an address.
            is_name = _HOST_NAME.fullmatch(name) and not name.rpartition(".")[2].isdigit()
            if found[1].startswith("[") or not is_name:
                raise ValueError(f"{text!r} has neither a host name nor an address") from None
        return JobHost(name, int(found[2]))

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


def parse_named(text: str) -> str:
    """Parse a host as an operator names it, optionally with a leading ``*.`` for all names below
    it. Return its canonical form; raise ValueError."""
    wildcard = "*." if text.startswith("*.") else ""
    host = JobHost.parse(text.removeprefix(wildcard))
    if wildcard and host.is_address:
        raise ValueError(f"{text!r} has * before an address")
    return f"{wildcard}{host}"
