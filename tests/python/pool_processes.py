# SPDX-License-Identifier: Apache-2.0
"""A controller and workers as separate processes, on loopback, for pool tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from native_build import native_folder

from penstock import _pool

SECONDS_MAX = 90.0

_DATA = re.compile(r" and for batches at (tcp://\S+) ")
_LISTENS = re.compile(r"listens at (tcp://\S+) .*id ([0-9a-f]{16}), process (\d+)$")


class Process:
    """A penstock command, with all its output. ``within`` is its prefix, such as a command that
    enters a namespace and executes the rest."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        within: Sequence[str] = (),
        folder: Path | None = None,
        program: Sequence[str] = (sys.executable, "-m", "penstock"),
    ) -> None:
        self.process = subprocess.Popen(
            [*within, *program, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._condition = threading.Condition()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._condition:
                self.lines.append(line.rstrip("\n"))
                self._condition.notify_all()
        with self._condition:
            self._condition.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_lines(
        self, wanted: Callable[[str], bool], count: int = 1, after: int = 0
    ) -> list[str]:
        """Return the wanted lines, without the first ``after`` lines of the output, once there are
        ``count``."""
        deadline = time.monotonic() + SECONDS_MAX
        with self._condition:
            while True:
                found = [line for line in self.lines[after:] if wanted(line)]
                if len(found) >= count:
                    return found
                left = deadline - time.monotonic()
                assert left > 0 and self._reader.is_alive(), self.output
                self._condition.wait(min(left, 1.0))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(SECONDS_MAX)
        self._reader.join(SECONDS_MAX)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Worker(Process):
    """``penstock worker``, with its workers' server, which it supervises."""

    def served(self, count: int = 1) -> list[tuple[str, str, int]]:
        """Return the id, endpoint and server pid of the first ``count`` workers that listen, in the
        order of their log lines. Only a single worker has a server to itself."""
        lines = self.wait_for_lines(lambda line: _LISTENS.search(line) is not None, count)
        found = []
        for line in lines:
            match = _LISTENS.search(line)
            assert match is not None
            found.append((match[2], match[1], int(match[3])))
        return found

    def data_endpoint(self) -> str:
        """Return the endpoint at which the first worker serves the bytes of batches."""
        self.served()
        match = _DATA.search(self.output)
        assert match is not None
        return match[1]

    @property
    def pids(self) -> list[int]:
        """Return the pids of the current servers."""
        return [pid for pid in {pid: None for _, _, pid in self.served(0)} if _is_alive(pid)]


class PoolProcesses:
    """One user's pool. Its shared keys belong to the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(runtime),
            "TMPDIR": str(temporary),
        }
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
            self.environment.pop(name, None)
        self.endpoint = ""
        self.processes: list[Process] = []

    def start_controller(
        self, *arguments: str, bind: str = "tcp://127.0.0.1:0", within: Sequence[str] = ()
    ) -> Process:
        process = Process(["controller", "--bind", bind, *arguments], self.environment, within)
        self.processes.append(process)
        line = process.wait_for_lines(lambda line: "listens at tcp://" in line)[0]
        self.endpoint = line.split("listens at ")[1].split(",")[0]
        return process

    def start_worker(
        self,
        *arguments: str,
        processes: int = 1,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        worker = self._launch_worker(
            "--processes", str(processes), *arguments, within=within, environment=environment
        )
        worker.served(processes)
        return worker

    def start_workers(self, count: int, *arguments: str) -> list[Worker]:
        """Start ``count`` commands ``penstock worker`` with one worker each, whose server can be
        killed alone."""
        workers = [self._launch_worker(*arguments) for _ in range(count)]
        for worker in workers:
            worker.served()
        return workers

    def _launch_worker(
        self,
        *arguments: str,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        worker = Worker(
            ["worker", "--controller", self.endpoint, *arguments],
            {**self.environment, **(environment or {})},
            within,
        )
        self.processes.append(worker)
        return worker

    def start_native_worker(self, *arguments: str, processes: int = 1) -> Worker:
        """Start ``penstock-worker``, which runs plug-ins."""
        program = native_folder() / "penstock-worker"
        options = ["--controller", self.endpoint, "--processes", str(processes), *arguments]
        worker = Worker(options, self.environment, program=(str(program),))
        self.processes.append(worker)
        worker.served(processes)
        return worker

    def start_training(self) -> Process:
        """Start steady_training.py, which trains until it is ended."""
        program = (sys.executable, str(Path(__file__).with_name("steady_training.py")))
        environment = {**self.environment, "PENSTOCK_POOL": self.endpoint}
        training = Process([], environment, program=program)
        self.processes.append(training)
        return training

    def start_altered_worker(self, alteration: str, argument: str, *options: str) -> Worker:
        """Start a worker of altered_worker.py."""
        program = (sys.executable, str(Path(__file__).with_name("altered_worker.py")))
        arguments = [alteration, argument, self.endpoint, "", *options]
        worker = Worker(arguments, self.environment, program=program)
        self.processes.append(worker)
        worker.served()
        return worker

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(_pool.pool_status(self.endpoint, None, SECONDS_MAX))
        return status

    def close(self) -> None:
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                process.process.kill()
            process.wait()

    def end(self) -> None:
        """End everything as users do. Only the keys are left."""
        for process in reversed(self.processes):
            process.end()
        self.close()
        killed = [
            f"-{one.process.pid}-" for one in self.processes if one.process.returncode == -9
        ]  # which could remove no files; this user's next process does so
        left = [path.name for path in (self.folder / "tmp").glob("*penstock*")]
        left = [name for name in left if not any(pid in name for pid in killed)]
        assert left == [], left


def pool_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *of_controller: str
) -> Iterator[PoolProcesses]:
    """Yield a pool with a controller and no workers yet. The body of a fixture."""
    pool = PoolProcesses(tmp_path)
    for name in ("XDG_RUNTIME_DIR", "PENSTOCK_POOL", "PENSTOCK_KEYS"):
        if name in pool.environment:
            monkeypatch.setenv(name, pool.environment[name])
        else:
            monkeypatch.delenv(name, raising=False)
    try:
        pool.start_controller(*of_controller)
        yield pool
        pool.end()
    finally:
        pool.close()


def wait_until(is_so: Callable[[], bool], what: Callable[[], object] = lambda: None) -> None:
    """Wait for it at most SECONDS_MAX. The assertion that fails then shows `what()`."""
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def clients() -> int:
    """How many clients of a pool this process runs: each has one thread of that name."""
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name == "pk_pool_io" for name in names)


def expect_clients(count: int) -> None:
    """Wait for that count: the kernel shows a thread for a moment after it was joined, and a thread
    has the name of the one that starts it until it sets its own."""
    deadline = time.monotonic() + 5
    while clients() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clients() == count


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
