# SPDX-License-Identifier: Apache-2.0
"""Slurm's behaviour beyond the contract of engines: its states, its words, its arrays."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_pools import SlurmPool, needs_slurm
from pool_processes import SECONDS_MAX

from penstock.engines.engine import EngineError, EngineRefusal, WorkerCommand, WorkerState
from penstock.engines.slurm_engine import SlurmEngine

pytestmark = [pytest.mark.slow, needs_slurm]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmPool]:
    one = SlurmPool(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.long
def test_workers_beyond_node_capacity_stay_pending(slurm: SlurmPool) -> None:
    slurm.up("--min", "6", "--max", "6")
    status = slurm.status_when(lambda status: (status["engine"] or {}).get("running") == 4)
    assert status["engine"]["starting"] == 2
    assert len(slurm.jobs("PENDING")) == 2


def engine_of(
    slurm: SlurmPool, controller: str = "tcp://127.0.0.1:9", **options: Any
) -> SlurmEngine:
    command = WorkerCommand(controller, None, 60.0)
    return SlurmEngine(command, "pk-7e57-", slurm.state, **options)


def test_sbatch_rejection_raises_with_slurm_message(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, partition="nowhere")
    with pytest.raises(EngineRefusal, match="sbatch failed with exit code 1: .*invalid partition"):
        engine.spawn(["pk-7e57-1"])
    assert engine.workers() == {}


def test_pending_job_is_starting_and_can_be_stopped(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, partition="harvest", cpus=2)
    slurm.cluster.ask("scontrol", "update", "partition=harvest", "state=DOWN")
    engine.spawn(["pk-7e57-1", "pk-7e57-2"])
    assert engine.workers() == dict.fromkeys(["pk-7e57-1", "pk-7e57-2"], WorkerState.STARTING)
    engine.stop("pk-7e57-1", at_once=False)
    assert [*engine.workers()] == ["pk-7e57-2"]
    engine.stop("pk-7e57-1", at_once=True)


@pytest.mark.long
def test_many_workers_share_one_job_array(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, partition="harvest")
    names = [f"pk-7e57-{number}" for number in range(1995, 2004)]  # beyond the tasks of an array
    engine.spawn(names)
    assert {*engine.workers()} == {*names}
    lines = slurm.cluster.ask("squeue", "--noheader", "--format=%F", "--array").split()
    assert len({*lines}) == 1
    deadline = time.monotonic() + SECONDS_MAX
    while WorkerState.RUNNING not in engine.workers().values():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running = [name for name, one in engine.workers().items() if one == WorkerState.RUNNING]
    for name in [*running, names[-1]]:
        engine.stop(name, at_once=True)
    while any(name in engine.workers() for name in [*running, names[-1]]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_array_task_output_is_readable_after_exit(slurm: SlurmPool) -> None:
    engine = engine_of(slurm, "no-address", partition="harvest")
    names = [f"pk-7e57-{number}" for number in range(95, 103)]
    engine.spawn(names)
    deadline = time.monotonic() + SECONDS_MAX
    while engine.workers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for name in names:
        assert "no-address" in engine.last_log_line(name)
    assert engine.last_log_line("pk-7e57-103") == ""


@pytest.mark.long
def test_unreachable_slurm_controller_raises_engine_trouble(slurm: SlurmPool) -> None:
    engine = engine_of(slurm)
    slurm.cluster.kill_node("slurmctld")
    with pytest.raises(EngineError, match="squeue"):
        engine.workers()


class EnvironmentDump:
    """In place of a worker's command: writes its environment to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def arguments(self) -> list[str]:
        new = self._path.with_suffix(".new")
        program = f"import os, pathlib; pathlib.Path({str(new)!r}).write_bytes("
        program += "b'\\0'.join(b'='.join(pair) for pair in os.environb.items())); "
        program += f"os.rename({str(new)!r}, {str(self._path)!r})"
        return [sys.executable, "-c", program]


def test_slurm_job_environment_has_no_secrets(
    slurm: SlurmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker, and so the code of every trainer, had the whole environment of the operator's
    shell."""
    for name in ("PROVIDER_API_KEY", "PENSTOCK_SIGNING_KEY", "HF_TOKEN", "UNRELATED"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("PENSTOCK_CODE_PATHS", "/data/code")
    path = slurm.state.parent / "environment"
    command: Any = EnvironmentDump(path)
    engine = SlurmEngine(
        command, "pk-7e57-", slurm.state, partition="harvest", variables=["HF_TOKEN"]
    )
    engine.spawn(["pk-7e57-1"])
    deadline = time.monotonic() + SECONDS_MAX
    while not path.exists():
        assert time.monotonic() < deadline, engine.last_log_line("pk-7e57-1")
        time.sleep(0.05)
    found = dict(pair.split("=", 1) for pair in path.read_text().split("\0"))
    assert [name for name, value in found.items() if value == "hush"] == ["HF_TOKEN"]
    assert found["PENSTOCK_CODE_PATHS"] == "/data/code"
    assert found["PENSTOCK_WORKER_NAME"] == "pk-7e57-1"
    for name in ("PATH", "TMPDIR", "XDG_RUNTIME_DIR"):
        assert found[name] == os.environ[name]
