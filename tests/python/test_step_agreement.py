# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on their steps through a real store. Here they are threads of one process."""

from __future__ import annotations

import datetime
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import RankError, UnsupportedError
from penstock.ranks import job_store
from penstock.ranks import steps as rank_steps
from penstock.ranks.sharding import JobRank
from penstock.ranks.steps import CommonSteps, Ready, StepAgreement

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores() -> Iterator[list[Any]]:
    """A client for each rank."""
    timeout = datetime.timedelta(seconds=60)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    yield [served.clone() for _ in range(8)]
    gc.collect()


def agreement_of(stores: list[Any], rank: int, world_size: int, name: str) -> StepAgreement:
    return StepAgreement(lambda: stores[rank], JobRank(rank, world_size), name)


class Batches:
    """A stream of ``total`` batches, which are ready when it is asked for them, or later."""

    def __init__(self, total: int, seed: int) -> None:
        self.total = total
        self.given_count = self.here_count = 0
        self.rng = random.Random(seed)

    def look(self, wait_s: float, waited_s: float) -> Ready:
        coming = self.rng.choice([0, 0, 1, 1, 2, 3])
        self.here_count = min(self.total, self.here_count + coming, self.given_count + 3)
        ready_count = self.here_count - self.given_count
        is_end_seen = self.here_count == self.total and ready_count < 3 and coming > 0
        return Ready(ready_count, is_end_seen)

    def read(self, steps: CommonSteps, count_max: int = 1000) -> int:
        while self.given_count < count_max and steps.take_step(self.look):
            assert self.here_count > self.given_count, "the batch of an agreed step is here"
            self.given_count += 1
        return self.given_count


def run_ranks_in_threads(world_size: int, rank_main: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(rank_main, range(world_size)))


def run_case(stores: list[Any], name: str, rng: random.Random) -> None:
    """A few epochs of ranks with uneven numbers of batches, some of which they leave early."""
    world_size = rng.randrange(2, 9)
    epochs = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        few = rng.choice([1, 4, 12])
        totals = [rng.randrange(few + rng.randrange(4)) for _ in range(world_size)]
        leave_at = rng.choice([1000, 1000, 1000, rng.randrange(few + 1)])
        epochs.append((totals, leave_at, rng.randrange(1 << 30)))

    def rank_main(rank: int) -> list[tuple[int, Any]]:
        agreement = agreement_of(stores, rank, world_size, name)
        seen = []
        for totals, leave_at, seed in epochs:
            batches = Batches(totals[rank], seed + rank)
            agreement.epoch_end = None
            seen.append(
                (batches.read(CommonSteps(agreement), leave_at), agreement.epoch_end, batches)
            )
        return seen

    by_rank = run_ranks_in_threads(world_size, rank_main)
    for epoch, (totals, leave_at, _) in enumerate(epochs):
        expected = min(*totals, leave_at)
        for rank, seen in enumerate(by_rank):
            given_count, end, batches = seen[epoch]
            assert given_count == expected, "every rank takes the same steps"
            if leave_at <= min(totals):
                continue
            assert end.step_count == expected and totals[end.ended_rank] == expected
            assert end.dropped_batches == batches.here_count - given_count
            left_count = totals[rank] - given_count - end.dropped_batches
            assert left_count >= 0 and (end.has_more or left_count == 0), "all are accounted for"


@pytest.mark.parametrize(
    "count", [30, pytest.param(1000, marks=pytest.mark.long)], ids=["30 cases", "1,000 cases"]
)
def test_ranks_with_uneven_batches_take_the_same_steps(stores: list[Any], count: int) -> None:
    rng = random.Random(count)
    for number in range(count):
        run_case(stores, f"uneven/{count}/{number}", rng)


def test_error_names_missing_rank(stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "WAIT_S_MAX", 2.5)
    monkeypatch.setattr(rank_steps, "_WARN_AFTER_S", 0.5)

    def rank_main(rank: int) -> str:
        steps = CommonSteps(agreement_of(stores, rank, 3, "never"))
        with pytest.raises(RankError) as raised:
            Batches(5, 1).read(steps)
        return str(raised.value)

    with pytest.warns(match="which has announced no batch, to .*, for at most 2 s"):
        texts = run_ranks_in_threads(2, rank_main)
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 3 waits for rank 2, which has announced no batch, to" in text
        assert "a batch for step 0 of the epoch" in text


@pytest.mark.parametrize("slow", [0, 1])
def test_error_names_stuck_rank(
    stores: list[Any], monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    monkeypatch.setattr(job_store, "WAIT_S_MAX", 0.5)
    is_over = threading.Event()

    def rank_main(rank: int) -> str:
        steps = CommonSteps(agreement_of(stores, rank, 2, f"slow/{slow}"))
        if rank == slow:
            assert Batches(5, 1).read(steps, 2) == 2
            is_over.wait(60)
            return ""
        with pytest.raises(RankError) as raised:
            Batches(50, 1).read(steps)
        is_over.set()
        return str(raised.value)

    text = run_ranks_in_threads(2, rank_main)[1 - slow]
    assert f"waits for rank {slow}, which is at batch " in text


@pytest.mark.parametrize("leave", [StepAgreement.begin, StepAgreement.close])
@pytest.mark.parametrize("leaving", [0, 1])
def test_error_names_rank_that_leaves_an_epoch_early(
    stores: list[Any], leaving: int, leave: Callable[[StepAgreement], Any]
) -> None:
    def rank_main(rank: int) -> str:
        agreement = agreement_of(stores, rank, 2, f"leaving/{leaving}/{leave.__name__}")
        steps = CommonSteps(agreement)
        if rank == leaving:
            assert Batches(9, 1).read(steps, 2) == 2
            leave(agreement)
            return ""
        with pytest.raises(RankError) as raised:
            Batches(50, 1).read(steps)
        return str(raised.value)

    text = run_ranks_in_threads(2, rank_main)[1 - leaving]
    assert f"rank {leaving} has left the epoch before step" in text


def test_concurrent_iterators_of_one_loader_raise(stores: list[Any]) -> None:
    def rank_main(rank: int) -> None:
        agreement = agreement_of(stores, rank, 2, "beside")
        first, second = CommonSteps(agreement), CommonSteps(agreement)
        assert Batches(9, 1).read(first, 1) == Batches(9, 1).read(second, 1) == 1
        with pytest.raises(UnsupportedError, match="after a newer iterator of the same loader"):
            Batches(9, 1).read(first)

    run_ranks_in_threads(2, rank_main)


def test_lost_store_raises_immediately() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    steps = CommonSteps(StepAgreement(lambda: store, JobRank(1, 2), "gone"))
    del served
    with pytest.raises(RankError, match="the job's store does not answer"):
        Batches(5, 1).read(steps)
