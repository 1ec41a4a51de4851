# SPDX-License-Identifier: Apache-2.0
"""Isolate job processes from keys, files, the network and each other: the operator's options, the
machine's capabilities, and the setup of each job.

csrc/base/job_separation.h describes the mechanisms. The process that starts workers does not load
torch, so this module does not either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from penstock import _pool
from penstock.errors import PenstockError
from penstock.pool import job_group
from penstock.pool.job_network import ProxyProcess, enter_job

LEVELS = ("keys", "files", "tmp", "network", "user")
_UIDS_FOLDER = "/run/penstock-job-uids"


@dataclass(frozen=True, slots=True)
class IsolationOptions:
    """The options as the operator gives them."""

    levels: frozenset[str] | None = None  # None: keys, if possible; empty: no levels
    job_writes: tuple[str, ...] = ()
    job_hosts: tuple[str, ...] = ()  # as job_hosts.parse_named() returns them
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


# ---- Capabilities of the machine


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    isolation: JobIsolation
    news: list[str]  # how the requested isolation is implemented
    warnings: list[str]  # what remains unprotected


def plan_isolation(options: IsolationOptions, key_folder: str | None) -> IsolationPlan:
    """Try the isolation that ``options`` request. Without ``key_folder``, workers use the shared
    keys.

    Raise ValueError if isolation that was requested by name is not available.
    """
    _check(options)
    levels = options.levels
    named = levels or frozenset()
    news: list[str] = []
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
        reached = f" but {', '.join(plan.hosts)} through a proxy" if plan.hosts else ""
        news.append(f"jobs have no network{reached}, by {how}")
    if levels is None or levels:
        plan, said, trouble = _tried_keys(plan, key_folder, is_named="keys" in named)
        if trouble and "keys" in named:
            raise _cannot("keys", trouble)
        news += said
        warnings += [f"jobs are not kept from the keys: {trouble}"] if trouble else []
    plan, said = _limited(plan, options)
    news += said
    if named and os.geteuid() == 0 and "user" not in named:
        warnings.append(
            "jobs run as root, and can read disks and change what root owns; run the worker under "
            "another account, or name user in --isolate"
        )
    return IsolationPlan(plan, news, warnings)


def _check(options: IsolationOptions) -> None:
    named = options.levels or frozenset()
    for is_given, name, level in (
        (bool(options.job_writes), "--job-writes", "files"),
        (bool(options.job_hosts), "--job-hosts", "network"),
        (options.job_uids is not None, "--job-uids", "user"),
    ):
        if is_given and level not in named:
            raise ValueError(f"{name} must go with --isolate {level}; add {level} to --isolate")
    if "user" in named and options.job_uids is None:
        raise ValueError(
            "--isolate user must go with --job-uids FIRST-LAST; say which uids nobody has"
        )
    if options.job_cpu_weight is not None and options.job_group is None:
        raise ValueError(
            "--job-cpu-weight must go with --job-group; name a folder of cgroup v2 for the groups"
        )
    for path in options.job_writes:
        if not os.path.isdir(path):
            raise ValueError(f"--job-writes must name folders that are there, got {path}; make it")


def _cannot(level: str, why: str) -> ValueError:
    return ValueError(
        f"--isolate must name what this machine can do, got {level}: {why}; leave {level} out, or "
        f"allow it"
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
        raise _cannot("user", "only root can give processes other accounts")
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
            f"--job-hosts must go with a network namespace, which this machine does not give: "
            f"{why}; allow it, or leave --job-hosts out"
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
    news = []
    settings: dict[str, str] = {}
    wanted: set[str] = set()
    has = set() if options.job_group is None else job_group.controllers_of(options.job_group)
    if options.job_memory is not None:
        if "memory" in has:
            wanted.add("memory")
            settings |= {"memory.max": str(options.job_memory), "memory.oom.group": "1"}
            news.append("the memory of each job is bounded by memory.max of its group")
        else:
            plan = replace(plan, data_bytes=options.job_memory)
            news.append(
                "the memory of each process of a job is bounded by RLIMIT_DATA, which leaves out "
                "shared memory and files; " + _no_controller(options, "memory")
            )
    if options.job_processes is not None:
        if "pids" in has:
            wanted.add("pids")
            settings["pids.max"] = str(options.job_processes)
            news.append("the processes of each job are bounded by pids.max of its group")
        elif os.geteuid() == 0 and not plan.uids:
            raise ValueError(
                "--job-processes must go with --isolate user or with a --job-group that has the "
                "controller pids where the worker runs as root, whom RLIMIT_NPROC does not bound; "
                "add one of them"
            )
        else:
            plan = replace(plan, process_count=options.job_processes)
            news.append(
                "the processes of jobs are bounded by RLIMIT_NPROC, which counts all processes and "
                "threads of the account; " + _no_controller(options, "pids")
            )
    if options.job_cpu_weight is not None:
        if "cpu" not in has:
            raise ValueError(
                f"--job-cpu-weight must go with a --job-group that has the controller cpu, got "
                f"{options.job_group}; have it delegated, too"
            )
        wanted.add("cpu")
        settings["cpu.weight"] = str(options.job_cpu_weight)
    if options.job_group is not None:
        folder = os.path.realpath(options.job_group)
        job_group.enable(folder, wanted)
        plan = replace(plan, group=folder, group_settings=settings)
    return plan, news


def _no_controller(options: IsolationOptions, name: str) -> str:
    if options.job_group is None:
        return "--job-group bounds all of a job"
    return f"{options.job_group} has no controller {name}"


def _folders_of_python() -> list[str]:
    found = {os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path}
    return sorted(path for path in found if os.path.isdir(path))


# ---- Setup for each job


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The destination of one job's process. As JSON, it can be passed to a spawned process."""

    isolation: dict[str, Any] = field(default_factory=dict)  # of a JobIsolation
    folder: str = ""  # for its modules
    private: str = ""  # its temporary folder; "": the job has no private one
    group: str = ""
    uid: int | None = None
    job: int = 0
    proxy_fd: int | None = None  # for registering the job with the proxy, if there is one

    def enter(self) -> None:
        """Move this process there permanently. Call it in the process while it has one thread and
        before it runs any code of the job. Raise OSError or UnsupportedError."""
        isolation = JobIsolation(**self.isolation)
        if self.group:
            job_group.join(self.group)
        isolation.separation(self.private, self.folder, self.uid).separate()
        if self.private:
            private = "/tmp" if isolation.has_private_tmp else self.private
            os.environ["TMPDIR"] = private
            tempfile.tempdir = None  # drop the cached folder
            if self.uid is not None:
                os.environ["HOME"] = private
        if self.proxy_fd is not None:
            enter_job(self.proxy_fd, self.job)


class IsolatedJobs:
    """The folders, accounts and groups of one warm process's jobs. Confined to its thread."""

    def __init__(
        self, isolation: JobIsolation, code_root: str, proxy: ProxyProcess | None = None
    ) -> None:
        """``code_root`` has a separate folder for each job; its creator removes it. ``proxy`` is
        given if jobs may reach named hosts."""
        self._isolation = isolation
        self._code_root = code_root
        self._proxy = proxy
        self._jobs: set[int] = set()  # jobs that have not ended
        self._uids = _Uids(isolation.uids) if isolation.uids else None
        self._groups = (
            job_group.JobGroups(isolation.group, isolation.group_settings)
            if isolation.group
            else None
        )
        if isolation.uids:
            os.chmod(code_root, 0o711)  # other accounts may pass, but cannot list names

    def try_prepare(self, job: int, folder: str, tell: Callable[[str], None]) -> JobPlace | None:
        """Return a place for the process of ``job``, whose modules are in ``folder``. If the system
        lacks room for it, report that by ``tell`` and return None."""
        self._jobs.add(job)
        try:
            return self._prepare(job, folder)
        except OSError as error:
            tell(f"the process of a job could not be started: {error}")
            return None

    def _prepare(self, job: int, folder: str) -> JobPlace:
        uid = None if self._uids is None else self._uids.take(job)
        group = "" if self._groups is None else self._groups.make(job)
        proxy_fd = None if self._proxy is None else self._proxy.fd
        place = JobPlace(self._isolation.fields(), group=group, uid=uid, job=job, proxy_fd=proxy_fd)
        if not self._isolation.has_folder:
            return place
        private = self._private(job)
        for path in (folder, private):
            os.makedirs(path, mode=0o700, exist_ok=True)
            if uid is not None:
                os.chown(path, uid, uid)
        return replace(place, folder=folder, private=private)

    def close_in_child(self) -> None:
        """Call in a forked job process."""
        if self._uids is not None:
            self._uids.close()
        if self._proxy is not None:
            self._proxy.close_in_child()

    def clear(self, job: int) -> None:
        """End and remove the remains of a job that has ended."""
        self._jobs.discard(job)
        if self._groups is not None:
            self._groups.remove(job)
        if self._uids is not None:
            self._uids.give_back(job)
        if self._proxy is not None:
            self._proxy.end(job)
        shutil.rmtree(self._private(job), ignore_errors=True)

    def close(self) -> None:
        """Clear all jobs; their processes have ended."""
        for job in list(self._jobs):
            self.clear(job)
        if self._proxy is not None:
            self._proxy.close()

    def _private(self, job: int) -> str:
        return os.path.join(self._code_root, f"tmp-{job}")


class _Uids:
    """Uids, each of which belongs to one job on this machine at a time. A file locks a uid that is
    taken, so that the machine's workers may share a range."""

    def __init__(self, uids: Sequence[int]) -> None:
        self._first, self._last = uids
        self._taken: dict[int, tuple[int, int]] = {}  # uid and descriptor by job
        os.makedirs(_UIDS_FOLDER, mode=0o700, exist_ok=True)

    def take(self, job: int) -> int:
        """Return a free uid. Raise OSError if all are taken."""
        for uid in range(self._first, self._last + 1):
            fd = os.open(f"{_UIDS_FOLDER}/{uid}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            self._taken[job] = (uid, fd)
            return uid
        raise OSError(
            f"all uids of --job-uids {self._first}-{self._last} are taken by other jobs; name more"
        )

    def give_back(self, job: int) -> None:
        """Kill every process with the job's uid: no other program uses that uid."""
        if job not in self._taken:
            return
        uid, fd = self._taken.pop(job)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(fd)

    def close(self) -> None:
        """Call in a job process, which does not need the locks. They stay with the parent."""
        for _, fd in self._taken.values():
            os.close(fd)
        self._taken.clear()
