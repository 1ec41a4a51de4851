# SPDX-License-Identifier: Apache-2.0
"""A pool for a bench: a controller, and workers that start and leave at the bench's command.

Both are separate processes, and communicate over TCP with the keys of ``penstock keys``. Workers
are in one process each, like a trainer's local workers, or several per process, as with ``penstock
worker``. The former are forked from one process that has imported torch already, since 64 imports
would take this machine minutes. That process is this file, run with --nursery.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.pool.worker_spec import PoolWorkerSpec

HERE = Path(__file__).resolve().parent
START_S_MAX = 120.0
END_S_MAX = 20.0
LISTENS = re.compile(
    r"listens at (?P<endpoint>tcp://\S+) .*id (?P<worker_id>[0-9a-f]{16}), process (?P<pid>\d+)$"
)
_POLL_S = 0.02
_REAP_S = 0.2
_PR_SET_PDEATHSIG = 1


class PoolError(Exception):
    """A process of the pool did not start, or ended."""


@dataclass(frozen=True, slots=True)
class StartedWorker:
    worker_id: str
    pid: int
    endpoint: str
    listens_ns: int  # CLOCK_MONOTONIC, when trainers could connect; 0 if it is not known


class PoolHost:
    """Confined to the thread that made it; a context manager that leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        keep: str = "",
    ) -> None:
        """``folder`` is for the keys. ``prefix`` is a command that runs another command in a
        separate place, such as a network namespace, where ``address`` is. ``keep`` is the
        controller's option.
        """
        self.keys = str(folder / "keys")
        self.address = address
        self.endpoint = ""
        self.workers: list[StartedWorker] = []
        self.supervisor_pid = 0  # of start_command()
        self._folder = folder
        self._command: subprocess.Popen[bytes] | None = None
        self._prefix = list(prefix)
        self._keep = ["--keep", keep] if keep else []
        self._controller: subprocess.Popen[str] | None = None
        self._nursery: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __enter__(self) -> PoolHost:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        penstock = [sys.executable, "-m", "penstock"]
        made = subprocess.run([*penstock, "keys", self.keys], capture_output=True, text=True)
        if made.returncode != 0:
            raise PoolError(
                f"penstock keys exited with code {made.returncode}: {made.stderr.strip()}"
            )
        bind = ["--bind", f"tcp://{self.address}:0"]
        self._controller = subprocess.Popen(
            [*self._prefix, *penstock, "controller", *bind, "--keys", self.keys, *self._keep],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        assert self._controller.stdout is not None
        line = self._controller.stdout.readline()
        if " at tcp://" not in line:
            raise PoolError(f"the controller of the bench did not start: {line.strip()!r}")
        self.endpoint = line.split("listens at ")[1].split(",")[0]
        self._nursery = subprocess.Popen(
            [*self._prefix, sys.executable, str(HERE / "pool_host.py"), "--nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def controller_pid(self) -> int:
        assert self._controller is not None
        return self._controller.pid

    def start_workers(self, count: int) -> None:
        """Has them started, and returns immediately; ``take_news`` reports when they are there."""
        self._send_order({"start": count, "controller": self.endpoint, "keys": self.keys,
                    "bind": f"tcp://{self.address}:0"})  # fmt: skip

    def start_command(self, count: int) -> None:
        """Runs `penstock worker` with this many workers, once, and returns when they listen. The
        pids are the pids of their servers."""
        log = self._folder / "worker.log"
        command = [sys.executable, "-m", "penstock", "worker", "--controller", self.endpoint]
        command += ["--keys", self.keys, "--bind", f"tcp://{self.address}:0"]
        with log.open("wb") as output:
            self._command = subprocess.Popen(
                [*self._prefix, *command, "--processes", str(count)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self.supervisor_pid = self._command.pid
        deadline = time.monotonic() + START_S_MAX
        while len(self.workers) < count:
            has_ended = self._command.poll() is not None
            log_text = log.read_text()
            self.workers = [
                StartedWorker(found["worker_id"], int(found["pid"]), found["endpoint"], 0)
                for found in map(LISTENS.search, log_text.splitlines())
                if found is not None
            ]
            if has_ended or time.monotonic() > deadline:
                raise PoolError(f"the workers of the bench did not start: {log_text.strip()!r}")
            time.sleep(_POLL_S)

    def end_worker(self, pid: int, number: int = signal.SIGTERM) -> None:
        """Sends a worker a signal."""
        self._send_order({"pid": pid, "signal": int(number)})
        self.workers = [worker for worker in self.workers if worker.pid != pid]

    def take_news(self, timeout_s: float = 0.0) -> list[StartedWorker]:
        """The workers that have started to listen since the last call. Raises PoolError when no
        more can start.
        """
        assert self._nursery is not None and self._nursery.stdout is not None
        pipe = self._nursery.stdout.fileno()
        if not select.select([pipe], [], [], timeout_s)[0]:
            return []
        read = os.read(pipe, 1 << 16)
        if not read:
            raise PoolError("the process that forks workers has ended")
        *lines, self._unread = (self._unread + read).split(b"\n")
        news = [StartedWorker(**json.loads(line)) for line in lines]
        self.workers += news
        return news

    def wait_for_workers(self, count: int) -> None:
        """Wait until this many listen."""
        deadline = time.monotonic() + START_S_MAX
        while len(self.workers) < count:
            self.take_news(1.0)
            if time.monotonic() > deadline:
                raise PoolError(
                    f"only {len(self.workers)} of {count} workers listen after {START_S_MAX:.0f} s"
                )

    def close(self) -> None:
        if self._command is not None:
            end_process(self._command, signal.SIGTERM)
        if self._nursery is not None:
            assert self._nursery.stdin is not None
            self._nursery.stdin.close()  # which ends the workers
            end_process(self._nursery, signal.SIGCONT)
        if self._controller is not None:
            end_process(self._controller, signal.SIGTERM)

    def _send_order(self, order: dict[str, Any]) -> None:
        assert self._nursery is not None and self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()


def end_with_parent() -> None:
    """Has the system end the process to be started when the bench is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_process(process: subprocess.Popen[Any], number: int) -> None:
    """By the signal, and if it does not end by that, by force."""
    process.send_signal(number)
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run_nursery() -> None:
    """Forks workers as ordered on standard input, one order a line, until its end."""
    import torch  # noqa: F401 - which every worker needs

    from penstock.pool.worker_spec import PoolWorkerSpec

    children: dict[int, str] = {}  # and the folder for the code of their jobs
    unread = b""
    while True:
        if select.select([0], [], [], _REAP_S)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            for order in map(json.loads, lines):
                if "signal" in order:
                    if order["pid"] in children:
                        os.kill(order["pid"], order["signal"])
                    continue
                for _ in range(order["start"]):
                    spec = PoolWorkerSpec(
                        bind=order["bind"],
                        advertised=None,
                        data_bind=None,
                        data_advertised=None,
                        controller=order["controller"],
                        key_folder=order["keys"],
                        patience_s=60.0,
                        parent_pid=os.getpid(),
                    )
                    code_root = tempfile.mkdtemp(prefix="penstock-")
                    children[_fork_worker(spec, code_root)] = code_root
        _reap(children)
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S_MAX / 2
    while children:
        _reap(children)
        if time.monotonic() > deadline:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.02)


def _fork_worker(spec: PoolWorkerSpec, code_root: str) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        from penstock.pool.pool_worker import run_worker

        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        run_worker(spec, code_root, _report_endpoint, lambda text: print(text, file=sys.stderr))
        code = 0
    except Exception as error:
        print(f"a worker of the bench ended: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _report_endpoint(server: Any) -> None:
    line = {"worker_id": f"{server.worker_id:016x}", "pid": os.getpid(),
            "endpoint": server.endpoint, "listens_ns": time.monotonic_ns()}  # fmt: skip
    os.write(1, json.dumps(line).encode() + b"\n")


def _reap(children: dict[int, str]) -> None:
    for pid in [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == pid]:
        shutil.rmtree(children.pop(pid), ignore_errors=True)


if __name__ == "__main__" and "--nursery" in sys.argv:
    run_nursery()
