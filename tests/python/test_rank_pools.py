# SPDX-License-Identifier: Apache-2.0
"""One pool for all ranks of a job: how they find it, and how its workers are divided."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import GlooRanks
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from rank_pool_job import STEP_SIZE, Slow
from torch.utils.data import TensorDataset

import penstock
from penstock import DataLoader, Ranks
from penstock.errors import RankError

Start = Callable[..., GlooRanks]
PROGRAM = Path(__file__).with_name("rank_pool_job.py")
ADDRESS = "tcp://10.1.2.3:7000"


@pytest.fixture
def job() -> Iterator[None]:
    """A job whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(), num_workers=1, **options)


def test_pool_argument_overrides_variable_and_announcement(
    job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loader().pool is None
    penstock.announce_pool(ADDRESS)
    assert loader().pool == ADDRESS
    monkeypatch.setenv("PENSTOCK_POOL", "tcp://10.1.2.3:7001")
    assert loader().pool == "tcp://10.1.2.3:7001"
    assert loader(pool="tcp://10.1.2.3:7002").pool == "tcp://10.1.2.3:7002"
    assert loader(pool="").pool is None


def test_new_announcement_applies_to_later_loaders(job: None) -> None:
    penstock.announce_pool(ADDRESS)
    first = loader()
    penstock.announce_pool("tcp://10.1.2.3:7005")
    assert (first.pool, loader().pool) == (ADDRESS, "tcp://10.1.2.3:7005")


def test_announcement_is_scoped_to_its_run_id(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    penstock.announce_pool(ADDRESS)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert loader().pool is None


def test_announce_pool_without_process_group_raises() -> None:
    with pytest.raises(RankError, match="requires other ranks, .*; call init_process_group"):
        penstock.announce_pool(ADDRESS)


def test_announce_pool_rejects_invalid_address(job: None) -> None:
    with pytest.raises(
        ValueError, match="requires the address of a controller, .*, got '10.1.2.3:7000'"
    ):
        penstock.announce_pool("10.1.2.3:7000")


def test_warning_says_that_announce_pool_named_the_pool(job: None) -> None:
    penstock.announce_pool(ADDRESS)
    with pytest.warns(UserWarning, match=r"announce_pool\(\) names the pool 'tcp://10.1.2.3:7000'"):
        assert DataLoader(TensorDataset(), num_workers=0).pool is None


@pytest.fixture
def start(tmp_path: Path, pool: PoolProcesses) -> Iterator[Start]:
    jobs: list[GlooRanks] = []

    def start_job(seconds: list[float], **given: Any) -> GlooRanks:
        given |= {"announce": pool.endpoint, "seconds": seconds}
        # Ranks that are killed leave the folder of their local worker's code to later ranks.
        leftovers = tmp_path / "of ranks"
        leftovers.mkdir()
        environment = pool.environment | {"TMPDIR": str(leftovers)}
        jobs.append(GlooRanks(PROGRAM, tmp_path, len(seconds), given, environment))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


def wait_until(condition: Callable[[], bool], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def expected_steps(rank: int, world_size: int, count: int) -> list[Any]:
    """The batches of a loader without workers."""
    loader = DataLoader(
        Slow(0),
        shuffle=True,
        ranks=Ranks(rank=rank, world_size=world_size, global_batch_size=STEP_SIZE),
    )
    return [
        [indices.tolist(), points.tolist()] for indices, points in itertools.islice(loader, count)
    ]


def workers_by_rank(pool: PoolProcesses) -> dict[int, int]:
    return {each["rank"]: each["workers"] for each in pool.status()["trainers"]}


@pytest.mark.long
@pytest.mark.slow
def test_rank_that_waits_most_gets_more_workers(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=8)
    start([0.004, 0.028], lockstep=True)
    wait_until(
        lambda: workers_by_rank(pool).get(1, 0) >= 5 and workers_by_rank(pool).get(0, 0) >= 1,
        lambda: pool.status()["trainers"],
    )
    trainers = pool.status()["trainers"]
    assert len({each["group"] for each in trainers}) == 1
    assert {each["world_size"] for each in trainers} == {2}


@pytest.mark.slow
def test_killed_rank_does_not_affect_other_ranks(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=3)
    job = start([0.002] * 3, steps=300)
    wait_until(lambda: min(len(job.lines(rank)) for rank in range(3)) > 5, pool.status)
    job.ranks[0].send_signal(signal.SIGKILL)
    for rank in (1, 2):
        code, text = job.finish(rank)
        assert code == 0, text
        assert len(job.lines(rank)) == 300
    for rank in (1, 2):
        assert job.lines(rank) == expected_steps(rank, 3, 300)
