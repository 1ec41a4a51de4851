# SPDX-License-Identifier: Apache-2.0
"""A pool of each engine, and what may become of its workers from outside."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic_pools import Elastic
from pool_processes import SECONDS_MAX
from slurm_cluster import MISSING, SlurmCluster

GRACE_S = 3  # of what takes workers away with notice


class EnginePool(Elastic):
    """``processes`` are the workers that run, by name: their supervisors' pids."""

    can_refuse = True  # in words; else what there is no room for waits

    def kill_worker(self, name: str) -> None:
        """Its process, and before that the one that would start it again."""
        pid = self.processes()[name]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in [pid, *map(int, children)]:
            os.kill(one, signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """The node that the worker runs on, and all that runs there."""
        raise NotImplementedError

    def take_away(self, name: str, *, with_notice: bool) -> None:
        """Somebody else takes the worker's place."""
        raise NotImplementedError

    def refuse(self) -> None:
        """From now on the engine starts no worker."""
        raise NotImplementedError

    def parent_of(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class LocalPool(EnginePool):
    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_notice: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, monkeypatch, within=within)

    def take_away(self, name: str, *, with_notice: bool) -> None:
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
        logs.touch()  # no folder, so no worker has a log


class SlurmPool(EnginePool):
    """Two nodes of two workers each."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_notice: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        grace_s = GRACE_S if has_notice else 0
        self.cluster = SlurmCluster(folder / "slurm", grace_s=grace_s, within=within)
        for name, value in self.cluster.environment.items():
            monkeypatch.setenv(name, value)
        super().__init__(
            folder, monkeypatch, "--partition", "harvest", title="slurm", within=within
        )

    def jobs(self, state: str = "RUNNING") -> list[str]:
        lines = self.cluster.ask("squeue", "--noheader", "--format=%j %T").splitlines()
        return [line.split()[0] for line in lines if line.split()[1] == state]

    def node_of(self, name: str) -> str:
        return self.cluster.ask("squeue", "--noheader", f"--name={name}", "--format=%N").strip()

    def kill_node(self, name: str) -> None:
        node = self.node_of(name)
        self.cluster.kill_node(node)
        for other, pid in self.processes().items():
            if self.node_of(other) == node:
                os.kill(self.parent_of(pid), signal.SIGKILL)  # which would tell of the end
                os.kill(pid, signal.SIGKILL)

    def take_away(self, name: str, *, with_notice: bool) -> None:
        self.cluster.ask(
            "sbatch", "--partition=train", f"--nodelist={self.node_of(name)}", "--exclusive",
            "--output=/dev/null", "--wrap=sleep 3",
        )  # fmt: skip

    def refuse(self) -> None:
        self.cluster.ask("scontrol", "update", "partition=harvest", "state=INACTIVE")

    def close(self) -> None:
        super().close()  # first, so that nobody asks for new jobs
        self.cluster.close()


class RayPool(EnginePool):
    """Two nodes of two workers each, and a head of none."""

    can_refuse = False

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_notice: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        super().__init__(
            folder, monkeypatch, "--resource", "dataworker=1", title="ray", within=within
        )
        self._cluster = subprocess.Popen(
            [*within, sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line("address ").split()[1]
        self._engine += ["--address", self.address]

    def _line(self, beginning: str) -> str:
        assert self._cluster.stdout is not None
        lines = iter(self._cluster.stdout.readline, "")
        return next(line for line in lines if line.startswith(beginning))

    def _order(self, words: str) -> None:
        assert self._cluster.stdin is not None
        print(words, file=self._cluster.stdin, flush=True)
        self._line("done")

    def kill_node(self, name: str) -> None:
        self._order("node")

    def take_away(self, name: str, *, with_notice: bool) -> None:
        self._order(f"drain {name} {GRACE_S}" if with_notice else f"actor {name}")

    def refuse(self) -> None:
        self._order("fill")

    def requested(self) -> list[dict[str, float]]:
        """What Ray's autoscaler was asked for last."""
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


POOLS: dict[str, Any] = {"local": LocalPool, "slurm": SlurmPool, "ray": RayPool}

needs_slurm = pytest.mark.skipif(
    bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)
