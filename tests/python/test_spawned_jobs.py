# SPDX-License-Identifier: Apache-2.0
"""A pool worker on a machine where a process cannot be forked once it has imported torch: a library
that is loaded with it has a handler that hangs, ends or corrupts a forked child. Each job is then
given a new interpreter, and every property of a forked process holds for that one."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from ending_datasets import Numbers, StartingADaemon
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from test_job_processes import losses_of, pooled
from torch.utils.data import Dataset

from penstock import DataLoader

pytestmark = pytest.mark.slow

SAID = re.compile(
    r"jobs are spawned, since a process cannot be forked here after it has imported torch: "
    r"a forked child (.+); this delays each job by (\d+\.\d) s$"
)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def start_worker(pool: PoolProcesses, how: str = "end_after_forks", argument: str = "9") -> Worker:
    return pool.start_altered_worker(how, argument)


def said_by(worker: Worker) -> str:
    (line,) = worker.wait_for_lines(lambda line: "jobs are spawned" in line)
    found = SAID.search(line)
    assert found is not None, line
    assert 0 < float(found[2]) < SECONDS_MAX
    return found[1]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Regression(Dataset[Any]):
    """Pairs to fit a line to, with random draws."""

    def __init__(self) -> None:
        self.values = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.values[index] + torch.rand(6) @ torch.rand(6, 6), self.values[index].sum().sin()


@pytest.mark.parametrize(
    ("how", "argument", "fault"),
    [
        ("hang_after_forks", "0.5", "did not finish a computation with torch within 0.5 s"),
        pytest.param(
            "end_after_forks",
            "9",
            "ended while it computed with torch (SIGKILL)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "compute_wrongly_after_forks",
            "",
            "computed different results with torch",
            marks=pytest.mark.long,
        ),
    ],
)
def test_pool_without_fork_spawns_and_matches_losses(
    pool: PoolProcesses, how: str, argument: str, fault: str
) -> None:
    expected = losses_of(DataLoader(Regression(), batch_size=4, seeding="batch", shuffle=True))
    worker = start_worker(pool, how, argument)
    assert said_by(worker) == fault
    loader = pooled(pool, Regression(), batch_size=4, shuffle=True)
    assert losses_of(loader) == expected
    del loader
    assert worker.end() == 0


class Looking(Dataset[dict[str, Any]]):
    """The state of its process."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
            "variable": os.environ.get("OF_THE_WORKER", ""),
            "path": [one for one in sys.path if "penstock-code-" not in one],  # of this job alone
            "session": os.getsid(0) == os.getpid(),
            "input": os.readlink("/proc/self/fd/0"),
            "sockets": sum("socket:" in one for one in process_traces.descriptors()),
            "limits": [
                resource.getrlimit(getattr(resource, name))
                for name in sorted(dir(resource))
                if name.startswith("RLIMIT_")
            ],
            "deaf": str(signal.getsignal(signal.SIGTERM)).split(" at ")[0],
        }


def look(pool: PoolProcesses, worker: Worker) -> dict[str, Any]:
    """By the only worker, which is ended then."""
    ((_, _, server),) = worker.served()
    batches = iter(pooled(pool, Looking()))
    found = next(batches)  # its process ends with `batches`
    assert parent_of(parent_of(found.pop("pid"))) == server
    del batches
    assert worker.end() == 0
    return dict(found)


def test_spawned_job_process_equals_a_forked_one(pool: PoolProcesses) -> None:
    pool.environment["OF_THE_WORKER"] = "here"
    forked = look(pool, pool.start_altered_worker("refuse_forks", "0"))
    worker = start_worker(pool)
    said_by(worker)
    assert look(pool, worker) == forked
    assert forked["variable"] == "here"


class Ending(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            print("about to end", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_spawned_process_death_is_reported_and_cleaned_up(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    worker = start_worker(pool)
    batches = iter(pooled(pool, Ending()))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"(?s)died.* batch 3 .*was ended by SIGKILL") as caught:
        next(batches)
    assert re.search(r"(?s)its last output: .*about to end", str(caught.value))
    del batches
    batches = iter(pooled(pool, StartingADaemon(tmp_path)))
    assert next(batches) == 0
    daemon = int((tmp_path / "daemon").read_text())
    ((_, _, server),) = worker.served()
    (warm,) = process_traces.children(server)
    jobs = process_traces.children(warm)
    os.kill(warm, signal.SIGKILL)
    assert process_traces.wait_gone([server, *jobs, daemon], SECONDS_MAX) == []
    (tmp_path / "go").touch()
    del batches


def test_working_fork_is_used(pool: PoolProcesses) -> None:
    worker = pool.start_worker()
    assert list(pooled(pool, Numbers())) == list(range(6))
    assert "jobs are spawned" not in worker.output
