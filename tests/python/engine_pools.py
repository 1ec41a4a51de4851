# SPDX-License-Identifier: Apache-2.0
"""A pool for each engine, and external events that affect its workers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic_pools import Elastic
from pool_processes import SECONDS_MAX
from slurm_cluster import MISSING, SlurmCluster

GRACE_S = 3  # for events that take workers away with notice


class EnginePool(Elastic):
    """A pool of an engine. ``processes`` are the running workers by name: the pids of their
    supervisors. With ``has_notice``, workers that are taken away have GRACE_S before they are
    ended."""

    title = "local"
    options: Sequence[str] = ()  # of `penstock up`
    can_refuse = True  # with a message; otherwise workers without room stay pending

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_notice: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        self.has_notice = has_notice
        self._within = within
        self.prepare(folder, monkeypatch)
        super().__init__(folder, monkeypatch, *self.options, title=self.title, within=within)
        self.begin(monkeypatch)

    def prepare(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prepare, before the environment of the pool's processes is fixed."""

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prepare after that, and before `up`."""

    def kill_worker(self, name: str) -> None:
        kill_family(self.processes()[name])

    def kill_node(self, name: str) -> None:
        """Kill the worker's node with all its processes."""
        raise NotImplementedError

    def preempt(self, name: str, *, with_notice: bool) -> None:
        """Give the worker's place to another user."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Make the engine reject new workers from now on."""
        raise NotImplementedError


def kill_family(pid: int) -> None:
    """Kill a worker and its supervisor, which would restart it. The supervisor is stopped first and
    killed last: a worker whose supervisor is dead leaves the controller properly."""
    os.kill(pid, signal.SIGSTOP)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in [*map(int, children), pid]:
        os.kill(one, signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class LocalPool(EnginePool):
    def preempt(self, name: str, *, with_notice: bool) -> None:
        pid = self.processes()[name]
        if with_notice:
            os.killpg(pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while name in self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def refuse(self) -> None:
        logs = self.state / "logs"
        logs.rename(self.state / "logs of before")
        logs.touch()  # a file instead of a folder, so workers have no logs


class SlurmPool(EnginePool):
    node_count = 2
    place_count = 2  # of each node, one worker per place

    title = "slurm"
    options = ("--partition", "harvest")

    def prepare(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = SlurmCluster(
            folder / "slurm",
            self.node_count,
            grace_s=GRACE_S if self.has_notice else 0,
            within=self._within,
            cpus=self.place_count,
        )
        for name, value in self.cluster.environment.items():
            monkeypatch.setenv(name, value)

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Also for jobs submitted by a test: killed jobs leave files.
        monkeypatch.setenv("TMPDIR", self.pool.environment["TMPDIR"])

    def jobs(self, state: str = "RUNNING") -> list[str]:
        lines = self.cluster.ask("squeue", "--noheader", "--format=%j %T").splitlines()
        return [line.split()[0] for line in lines if line.split()[1] == state]

    def node_of(self, name: str) -> str:
        """Return the node that Slurm reports to the worker; all tasks of an array share a job
        name."""
        environ = Path(f"/proc/{self.processes()[name]}/environ").read_bytes().decode()
        variables = dict(line.split("=", 1) for line in environ.split("\0") if line)
        return variables["SLURMD_NODENAME"]

    def kill_node(self, name: str) -> None:
        node = self.node_of(name)
        pids = [pid for other, pid in self.processes().items() if self.node_of(other) == node]
        self.cluster.kill_node(node)
        for pid in pids:
            os.kill(parent_of(pid), signal.SIGKILL)  # it would report the end to Slurm
            kill_family(pid)

    def preempt(self, name: str, *, with_notice: bool) -> None:
        self.cluster.ask(
            "sbatch", "--partition=train", f"--nodelist={self.node_of(name)}", "--exclusive",
            "--output=/dev/null", "--wrap=sleep 3",
        )  # fmt: skip

    def refuse(self) -> None:
        self.cluster.ask("scontrol", "update", "partition=harvest", "state=INACTIVE")

    def close(self) -> None:
        try:
            super().close()  # first, so that no new jobs are requested
        finally:
            self.cluster.close()


class RayPool(EnginePool):
    """Two nodes of two workers each, and a head without workers."""

    title = "ray"
    options = ("--resource", "dataworker=1")
    can_refuse = False

    def prepare(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Ray names its sockets by long paths, and the folders of tests have long names, too.
        self._folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")
        self._cluster = subprocess.Popen(
            [*self._within, sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_TMPDIR": self._folder.name},
            text=True,
        )
        self.address = self._line("address ").split()[1]
        self._engine += ["--address", self.address]

    def _line(self, beginning: str) -> str:
        assert self._cluster.stdout is not None
        lines = iter(self._cluster.stdout.readline, "")
        found = next((line for line in lines if line.startswith(beginning)), None)
        assert found, f"Ray's cluster ended without {beginning!r}, with {self._cluster.wait()}"
        return found

    def _order(self, words: str) -> None:
        assert self._cluster.stdin is not None
        print(words, file=self._cluster.stdin, flush=True)
        self._line("done")

    def kill_node(self, name: str) -> None:
        self._order("node")

    def preempt(self, name: str, *, with_notice: bool) -> None:
        self._order(f"drain {name} {GRACE_S}" if with_notice else f"actor {name}")

    def refuse(self) -> None:
        self._order("fill")

    def requested(self) -> list[dict[str, float]]:
        """Return the last request to Ray's autoscaler."""
        assert self._cluster.stdin is not None
        print("requested", file=self._cluster.stdin, flush=True)
        found: list[dict[str, float]] = json.loads(self._line("requested ").partition(" ")[2])
        self._line("done")
        return found

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self.down().wait()
        super().close()
        self._cluster.communicate("", timeout=SECONDS_MAX)
        self._folder.cleanup()


POOLS: dict[str, Any] = {"local": LocalPool, "slurm": SlurmPool, "ray": RayPool}

needs_slurm = pytest.mark.skipif(
    bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)
