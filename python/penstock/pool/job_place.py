# SPDX-License-Identifier: Apache-2.0
"""Set up the isolation of each job: its folders, account, control group and way to named hosts.

A job that may reach named hosts has a separate network namespace, in which an HTTP proxy at
127.0.0.1 is the only way out. The job process creates the proxy's listening socket, since it is in
the namespace, and passes it to the proxy process (job_proxy.py), which is outside, before it runs
any code of the job. The proxy serves all jobs of one warm process, identifies them by their
numbers, has no key, and ends with the warm process.

A spawned job process enters its place before it loads torch, so this module does not load it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.pool.job_isolation import JobIsolation

_UIDS_FOLDER = "/run/penstock-job-uids"
_EMPTY_S_MAX = 1.0  # until the killed processes of a group are gone
_GROUP_NAME = re.compile(r"penstock-(\d+)-\d+")

# In each job's namespace, in which no other program listens.
_PORT = 3128
_BACKLOG = 128
_PROXY_END_S_MAX = 2.0
_PROXY_SETTINGS = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_NO_PROXY_SETTINGS = ("NO_PROXY", "no_proxy")
# Sent to the proxy: whether the job starts (with its socket) or has ended; and its number.
MESSAGE = struct.Struct("=?Q")

_PROXY_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.pool.job_proxy import run_proxy
run_proxy(json.loads(sys.argv[2]), int(sys.argv[3]))
"""


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
            Path(self.group, "cgroup.procs").write_text("0")
        isolation.separation(self.private, self.folder, self.uid).separate()
        if self.private:
            private = "/tmp" if isolation.has_private_tmp else self.private
            os.environ["TMPDIR"] = private
            tempfile.tempdir = None  # drop the cached folder
            if self.uid is not None:
                os.environ["HOME"] = private
        if self.proxy_fd is not None:
            _enter_proxy(self.proxy_fd, self.job)


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
            JobGroups(isolation.group, isolation.group_settings) if isolation.group else None
        )
        if isolation.uids:
            os.chmod(code_root, 0o711)  # other accounts may pass, but cannot list names

    def try_prepare(self, job: int, folder: str, warn: Callable[[str], None]) -> JobPlace | None:
        """Return a place for the process of ``job``, whose modules are in ``folder``. If the system
        lacks room for it, report that by ``warn`` and return None."""
        self._jobs.add(job)
        try:
            return self._prepare(job, folder)
        except OSError as error:
            warn(f"the process of a job could not be started: {error}")
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
            self._uids.release(job)
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
            f"all uids of --job-uids {self._first}-{self._last} are in use by other jobs; name more"
        )

    def release(self, job: int) -> None:
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


class JobGroups:
    """The control groups of one warm process's jobs, below a cgroup v2 folder that the operator has
    delegated. They limit the resources of a job and of all processes that it starts, even in
    another session. Confined to its thread."""

    def __init__(self, folder: str, settings: Mapping[str, str]) -> None:
        """``settings`` maps file names to the text written to these files in each group. Removes
        groups left by warm processes that were killed."""
        self._folder = folder
        self._settings = settings
        self._late: set[str] = set()  # groups that were not empty yet
        for path in Path(folder).iterdir():
            named = _GROUP_NAME.fullmatch(path.name)
            if named is not None and not os.path.exists(f"/proc/{named[1]}"):
                self._remove(str(path))

    def make(self, job: int) -> str:
        """Create the group of a job. Raise OSError."""
        path = self._path_of(job)
        os.mkdir(path)
        for name, text in self._settings.items():
            Path(path, name).write_text(text)
        return path

    def remove(self, job: int) -> None:
        """Kill the remaining processes of a job and remove its group, if it has one."""
        self._remove(self._path_of(job))
        for path in list(self._late):
            self._remove(path)

    def _path_of(self, job: int) -> str:
        return os.path.join(self._folder, f"penstock-{os.getpid()}-{job}")

    def _remove(self, path: str) -> None:
        self._late.discard(path)
        with contextlib.suppress(OSError):
            Path(path, "cgroup.kill").write_text("1")  # from Linux 5.14
        try:
            _wait_until_empty(path)
            os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError:
            self._late.add(path)


def _wait_until_empty(path: str) -> None:
    deadline = time.monotonic() + _EMPTY_S_MAX
    with open(f"{path}/cgroup.events", "rb", buffering=0) as events:
        changes = select.poll()
        changes.register(events, select.POLLPRI)  # the system reports each change
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            changes.poll(left_s * 1e3)


class ProxyProcess:
    """The proxy process, owned by its warm process. Confined to its thread."""

    def __init__(self, isolation: Mapping[str, Any]) -> None:
        """Start the process. ``isolation`` has the fields of a JobIsolation. Raises OSError.

        Call it before a WarmChannel is created, which ends children that others have started.
        """
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            paths, settings = json.dumps(sys.path), json.dumps(isolation)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROXY_PROGRAM, paths, settings, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    @property
    def fd(self) -> int:
        """The descriptor for registering jobs. It is closed on exec."""
        return self._own.fileno()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._own.close()
        try:
            self._process.wait(_PROXY_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close_in_child(self) -> None:
        """Call in a job process, which closes `fd` itself."""
        self._own.detach()

    def end(self, job: int) -> None:
        """Close a job's connections, which also releases its namespace."""
        with contextlib.suppress(OSError):  # the proxy has ended, and so have all connections
            self._own.send(MESSAGE.pack(False, job), socket.MSG_DONTWAIT)


def _enter_proxy(proxy_fd: int, job: int) -> None:
    """Have the proxy serve this process, which has only loopback, and configure programs to use it.
    Close ``proxy_fd``. Raise OSError."""
    with socket.socket(fileno=proxy_fd) as proxy, socket.socket() as listener:
        listener.bind(("127.0.0.1", _PORT))
        listener.listen(_BACKLOG)
        socket.send_fds(proxy, [MESSAGE.pack(True, job)], [listener.fileno()])
    for name in _PROXY_SETTINGS:
        os.environ[name] = f"http://127.0.0.1:{_PORT}"
    for name in _NO_PROXY_SETTINGS:  # they apply to the worker's network
        os.environ[name] = ""
