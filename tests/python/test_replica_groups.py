# SPDX-License-Identifier: Apache-2.0
"""Ranks of one replica group have the same batches, which are made once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import GlooRanks
from pool_processes import PoolProcesses, pool_of
from replica_job import LENGTH, digest, loader_of
from torch.utils.data import IterableDataset

from penstock import DataLoader, Ranks
from penstock.errors import UnsupportedError

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("replica_job.py")
Start = Callable[..., GlooRanks]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture
def start(tmp_path: Path, pool: PoolProcesses) -> Iterator[Start]:
    jobs: list[GlooRanks] = []

    def start_job(groups: list[list[int]], **given: Any) -> GlooRanks:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        world_size = sum(map(len, groups))
        jobs.append(
            GlooRanks(PROGRAM, folder, world_size, given | {"groups": groups}, pool.environment)
        )
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


def expected(folder: Path, group: int, group_count: int, epochs: list[int | None]) -> list[Any]:
    """The lines of a rank of that group, from a loader without workers, pool and other ranks."""
    loader = loader_of(folder, {"groups": [[]] * group_count}, group, None)
    lines = []
    for epoch, steps in enumerate(epochs):
        for step, batch in enumerate(loader):
            lines.append([epoch, batch["index"].tolist(), digest(batch)])
            if step + 1 == steps:
                break
    return lines


def check(job: GlooRanks, groups: list[list[int]], epochs: list[int | None]) -> None:
    for number, ranks in enumerate(groups):
        wanted = expected(job.folder.parent, number, len(groups), epochs)
        for rank in ranks:
            code, text = job.finish(rank)
            assert code == 0, text
            assert job.lines(rank) == wanted


def test_ranks_of_a_replica_group_share_batches_from_a_pool(
    pool: PoolProcesses, start: Start
) -> None:
    pool.start_worker(processes=2)
    groups = [[0, 1], [2, 3]]
    job = start(groups, pool=pool.endpoint)
    check(job, groups, [None, None])
    made = (job.folder / "made").read_text().split()
    assert set(map(int, made)) == set(range(LENGTH))
    # Once in each epoch. A late batch is requested from a second worker.
    assert 2 * LENGTH <= len(made) < 3 * LENGTH


@pytest.mark.long
def test_replica_group_works_with_local_workers(start: Start) -> None:
    groups = [[0, 1, 2]]
    job = start(groups, workers=2)
    check(job, groups, [None, None])


@pytest.mark.long
def test_replica_group_epochs_may_end_early(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=2)
    groups = [[0, 1]]
    epochs: list[int | None] = [3, None, 1, 5]
    job = start(groups, pool=pool.endpoint, epochs=epochs)
    check(job, groups, epochs)


@pytest.mark.long
def test_replica_group_resumes_from_a_state(
    pool: PoolProcesses, start: Start, tmp_path: Path
) -> None:
    pool.start_worker(processes=2)
    loader = loader_of(tmp_path, {"groups": [[]]}, 0, None)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    job = start([[0, 1]], pool=pool.endpoint, epochs=[None], state=state)
    for rank in (0, 1):
        code, text = job.finish(rank)
        assert code == 0, text
        assert job.lines(rank) == expected(tmp_path, 0, 1, [None])[5:]


def test_replica_groups_repeat_the_steps_that_were_not_committed(
    pool: PoolProcesses, start: Start, tmp_path: Path
) -> None:
    pool.start_worker(processes=2)
    groups, keep = [[0, 1], [2, 3]], [1, 7, 12, 14]  # the last two are in the second epoch
    job = start(groups, pool=pool.endpoint, epochs=[None, 4], keep=keep)
    check(job, groups, [None, 4])
    states = [json.loads((job.folder / f"state-{rank}").read_text()) for rank in range(4)]
    assert all(state == states[0] for state in states)
    job = start(groups, pool=pool.endpoint, epochs=[None], keep=[0], state=states[3])
    for number, ranks in enumerate(groups):
        alone = loader_of(tmp_path, {"groups": [[], []], "keep": []}, number, None)
        alone.load_state_dict(states[0])
        wanted = [[0, batch["index"].tolist(), digest(batch)] for batch in alone]
        whole = expected(tmp_path, number, 2, [None, None])
        left = [whole[place] for place in (1, 7, 12, 14, *range(16, len(whole)))]
        assert [line[1:] for line in wanted] == [line[1:] for line in left]
        for rank in ranks:
            code, text = job.finish(rank)
            assert code == 0, text
            assert job.lines(rank) == wanted


@pytest.mark.long
def test_replica_ranks_with_other_uncommitted_steps_raise(
    pool: PoolProcesses, start: Start
) -> None:
    pool.start_worker(processes=1)
    states = []
    for keep in ([1], [2]):
        job = start([[0]], pool=pool.endpoint, epochs=[4], keep=keep)
        assert job.finish(0)[0] == 0
        states.append(json.loads((job.folder / "state-0").read_text()))
    job = start([[0, 1]], pool=pool.endpoint, keep=[], states=states)
    for rank in (0, 1):
        code, text = job.finish(rank)
        assert code != 0
        assert "RankError" in text and "uncommitted steps" in text


@pytest.mark.long
def test_sample_error_is_raised_on_every_rank(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=1)
    job = start([[0, 1]], pool=pool.endpoint, fail=11)
    for rank in (0, 1):
        code, text = job.finish(rank)
        assert code != 0
        assert "KeyError" in text and "sample 11 is broken" in text


@pytest.mark.long
def test_a_sample_that_fails_is_skipped_on_every_rank(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=1)
    given = {"fail": 11, "on_error": "skip"}
    job = start([[0, 1]], pool=pool.endpoint, **given)
    loader = loader_of(job.folder.parent, {"groups": [[]], **given}, 0, None)
    wanted: list[Any] = [
        [epoch, batch["index"].tolist(), digest(batch)] for epoch in range(2) for batch in loader
    ]
    (skipped,) = loader.skipped
    wanted.append([11, skipped.batch, 2])
    for rank in (0, 1):
        code, text = job.finish(rank)
        assert code == 0, text
        assert job.lines(rank) == wanted


@pytest.mark.long
def test_differently_seeded_ranks_raise(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=1)
    job = start([[0, 1]], pool=pool.endpoint, other_seed=[1])
    code, text = job.finish(1)
    assert code != 0
    assert "rank 1 has generator state (SHA-256)" in text
    assert "with the same seed or generator=" in text


@pytest.mark.long
def test_rank_with_different_order_raises(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=1)
    job = start([[0, 1]], pool=pool.endpoint, reseed=[1, 1])
    code, text = job.finish(1)
    assert code != 0
    assert "rank 1 requested batch 0 of an epoch, but rank 0" in text
    assert "has requested another batch at this position" in text


@pytest.mark.long
def test_error_names_missing_replica_rank(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=1)
    job = start([[0, 1]], pool=pool.endpoint, absent=1, wait_s=3)
    code, text = job.finish(0)
    assert code != 0
    assert "s for rank 1 to start an epoch with replica_group" in text


@pytest.mark.long
def test_error_names_dead_leader(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=1)
    job = start([[0, 1]], pool=pool.endpoint, kill=[0, 0, 8], wait_s=4)
    code, text = job.finish(1)
    assert code != 0
    assert "rank 0, which sends this rank the batches of its replica_group, has not" in text


@pytest.mark.long
def test_error_names_rank_that_stops_reading(pool: PoolProcesses, start: Start) -> None:
    pool.start_worker(processes=2)
    job = start([[0, 1]], pool=pool.endpoint, kill=[1, 0, 2], wait_s=4, values=4 << 20)
    code, text = job.finish(0)
    assert code != 0
    assert "s for rank 1, which takes the batches of their replica_group too slowly" in text


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [
        ([1], ValueError, r"replica_group must be different ranks from 0 to 0, got \[1\]"),
        ([0, 0], ValueError, r"must have different ranks from 0 on, got \[0, 0\]"),
        ("0", TypeError, "a process group, a device mesh of one dimension or a list of ranks"),
    ],
)
def test_invalid_replica_group_is_rejected(
    alone: None, group: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DataLoader(range(4), ranks=Ranks(replica_group=group), num_workers=1)


def test_replica_group_needs_workers_or_a_pool(alone: None) -> None:
    with pytest.raises(ValueError, match="requires workers, which make the batches"):
        iter(DataLoader(range(4), ranks=Ranks(replica_group=[0])))


@pytest.mark.parametrize("window", [False, 4])
def test_batches_of_a_replica_group_do_not_overtake(alone: None, window: bool | int) -> None:
    """Its ranks would take different batches in the same step."""
    with pytest.raises(ValueError, match=rf"in_order must be True with .*, got {window}; leave"):
        DataLoader(range(4), ranks=Ranks(replica_group=[0]), num_workers=1, in_order=window)


def test_sharded_replica_group_needs_rank_and_world_size(alone: None) -> None:
    with pytest.raises(ValueError, match=r"are required with replica_group and remainder, got"):
        Ranks(replica_group=[0], remainder="drop")
    own_order = DataLoader(range(4), num_workers=1, ranks=Ranks(replica_group=[0]))
    assert not own_order.shard_by_rank and own_order.replica_group == (0,)
    shared = DataLoader(range(4), num_workers=1, ranks=Ranks(0, 1, replica_group=[0]))
    assert shared.shard_by_rank and (shared.rank, shared.world_size) == (0, 1)


def test_iterable_dataset_is_rejected_in_replica_group(alone: None) -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(UnsupportedError, match="got the IterableDataset Numbers, whose batches"):
        iter(DataLoader(Numbers(), num_workers=1, ranks=Ranks(replica_group=[0])))
