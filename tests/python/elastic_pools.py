# SPDX-License-Identifier: Apache-2.0
"""A pool run by `penstock up`, and a training that keeps many workers busy on two cores."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, Process
from torch.utils.data import Dataset

from penstock import DataLoader, Pool
from penstock.engines.engine import NAME_VARIABLE


class Slow(Dataset[torch.Tensor]):
    def __init__(self, count: int, seconds: float = 0.02) -> None:
        self.count = count
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((3,), float(index))


class Elastic:
    """A pool run by `penstock up`, with an engine and its options. ``within`` is the prefix of its
    commands."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *engine: str,
        title: str = "local",
        within: Sequence[str] = (),
    ) -> None:
        self._engine = ["--engine", title, *engine]
        self._within = within
        self.pool = PoolProcesses(folder)
        self.state = folder / "state"
        monkeypatch.setenv("XDG_RUNTIME_DIR", self.pool.environment["XDG_RUNTIME_DIR"])
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
            monkeypatch.delenv(name, raising=False)

    def up(self, *arguments: str, within: Sequence[str] | None = None) -> Process:
        """Start `penstock up`. ``within`` replaces the pool's prefix."""
        process = Process(
            ["up", *self._engine, "--state", str(self.state), *arguments],
            self.pool.environment,
            self._within if within is None else within,
        )
        self.pool.processes.append(process)
        line = process.wait_for_lines(lambda line: "export PENSTOCK_POOL=" in line)[0]
        self.pool.endpoint = line.rpartition("=")[2]
        return process

    def down(self, *arguments: str) -> Process:
        process = Process(
            ["down", "--controller", self.pool.endpoint, *arguments],
            self.pool.environment,
            self._within,
        )
        self.pool.processes.append(process)
        return process

    def status_when(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so(status := self.pool.status()):
            assert time.monotonic() < deadline, (status, self.logs())
            time.sleep(0.1)
        return status

    def logs(self) -> str:
        return "\n".join(path.read_text()[-800:] for path in self.state.glob("logs/*.log"))

    def has_workers(self, count: int) -> dict[str, Any]:
        """Wait until exactly ``count`` workers report and are not draining, and no other worker
        processes run."""

        def is_so(status: dict[str, Any]) -> bool:
            staying = [one for one in status["workers"] if not one["is_draining"]]
            return len(staying) == count and len(self.processes()) == count

        return self.status_when(is_so)

    def runs_processes(self, is_so: Callable[[set[str]], bool]) -> set[str]:
        """Wait until the names of the workers with running processes meet a condition."""
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so(names := {*self.processes()}):
            assert time.monotonic() < deadline, (names, self.logs())
            time.sleep(0.1)
        return names

    def processes(self) -> dict[str, int]:
        """Return the engine's processes that supervise a worker, by the worker's name."""
        found: dict[int, str] = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            try:
                environ = Path(entry.path, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            runtime = f"XDG_RUNTIME_DIR={self.pool.environment['XDG_RUNTIME_DIR']}".encode()
            names = [one for one in environ if one.startswith(f"{NAME_VARIABLE}=".encode())]
            if names and runtime in environ:
                found[int(entry.name)] = names[0].decode().partition("=")[2]
        children = set()
        for pid in found:
            above = pid
            for _ in range(2):  # only root may read the environment of a worker's server
                try:
                    stat = Path(f"/proc/{above}/stat").read_text()
                except OSError:
                    break
                above = int(stat.rpartition(")")[2].split()[1])
                if above in found:
                    children.add(pid)
        return {name: pid for pid, name in found.items() if pid not in children}

    def loader(self, count: int, seconds: float = 0.02, **options: Any) -> Any:
        return loader(self.pool.endpoint, count, seconds, **options)

    def close(self) -> None:
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.pool.close()


# A command with this prefix finds the disk full: it cannot write more than 5 bytes to a file.
ON_A_FULL_DISK = ("prlimit", "--fsize=5:", "--")


@contextlib.contextmanager
def full_disk(up: Process) -> Iterator[None]:
    """Simulate a full disk for a running process and the processes that it starts meanwhile."""
    pid = up.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (5, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            free_disk(up)


def free_disk(up: Process) -> None:
    _, hard = resource.prlimit(up.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(up.process.pid, resource.RLIMIT_FSIZE, (hard, hard))


def loader(
    endpoint: str, count: int, seconds: float = 0.02, keys: str | None = None, **options: Any
) -> Any:
    torch.manual_seed(3)
    pool = Pool(endpoint, keys=keys)
    return DataLoader(Slow(count, seconds), batch_size=4, shuffle=True, pool=pool, **options)


def expected(count: int) -> list[list[list[float]]]:
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(Slow(count, 0), batch_size=4, shuffle=True)
    return [batch.tolist() for batch in loader]
