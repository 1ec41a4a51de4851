# SPDX-License-Identifier: Apache-2.0
"""``ranks=Ranks()``: one order for any number of ranks, and one state of the job."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_processes import PoolProcesses, pool_of
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from penstock import DataLoader, MixtureSampler, Ranks

COUNT = 103
WORKERS = [0, 2]


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """The index of a sample, and draws from all the generators."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [index, torch.rand(()), np.random.random(), random.random(), torch.rand(())]
        return torch.tensor(drawn, dtype=torch.float64)


class DrawingWithGenerator(Drawing):
    """Draws from the generator that it is given, too."""

    def __getitem__(self, index: int, generator: Any = None) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([super().__getitem__(index), torch.rand(1, generator=generator)])


def loaders(dataset: Any, world_size: int, **options: Any) -> list[Any]:
    """The loaders of all ranks. Options of `Ranks` may be among the others."""
    options = {"shuffle": True, "global_batch_size": 12, **options}
    of_ranks = {
        name: options.pop(name) for name in ("global_batch_size", "remainder") if name in options
    }
    return [
        DataLoader(dataset, ranks=Ranks(rank, world_size, **of_ranks), **options)
        for rank in range(world_size)
    ]


def steps(ranks: list[Any]) -> Iterator[list[torch.Tensor]]:
    """The batches of each step, one a rank."""
    yield from zip(*ranks, strict=True)  # type: ignore[misc]


def rows(ranks: list[Any]) -> list[list[list[float]]]:
    """The samples of each step, over all ranks, in the order of the ranks."""
    return [torch.cat(step).tolist() for step in steps(ranks)]


@pytest.mark.long("dataset1")
@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Drawing(), DrawingWithGenerator()])
def test_step_is_the_same_for_any_number_of_ranks(dataset: Any) -> None:
    (alone,) = loaders(dataset, 1, remainder="uneven")
    expected = [[batch.tolist() for batch in alone] for _ in range(2)]
    assert len(expected[0]) == 9 and len(expected[0][-1]) == 7
    assert expected[0] != expected[1], "each epoch has an order and draws of its own"
    for world_size, workers in itertools.product([2, 3, 4, 6], WORKERS):
        ranks = loaders(dataset, world_size, remainder="uneven", num_workers=workers)
        assert [rows(ranks) for _ in range(2)] == expected


def test_remainder_is_padded_dropped_or_uneven() -> None:
    dataset = TensorDataset(torch.arange(17))

    def last(**options: Any) -> list[list[int]]:
        options = {"shuffle": False, "global_batch_size": 6, **options}
        return [list(one)[-1][0].tolist() for one in loaders(dataset, 3, **options)]

    assert last(remainder="pad") == last() == [[12, 13], [14, 15], [16, 12]]
    assert last(remainder="drop") == last(drop_last=True) == [[6, 7], [8, 9], [10, 11]]
    assert last(remainder="uneven") == [[12], [13, 14], [15, 16]]
    assert last(remainder="uneven", global_batch_size=16) == [[16]] * 3


@pytest.mark.parametrize("workers", WORKERS)
def test_every_rank_has_the_same_number_of_steps(workers: int) -> None:
    rng = random.Random(2)
    for _ in range(60 if workers == 0 else 2):
        count, world_size = rng.randrange(1, 60), rng.randrange(1, 9)
        size = rng.randrange(world_size, 40)
        dataset = TensorDataset(torch.arange(count))
        options = {"global_batch_size": size, "remainder": "uneven", "num_workers": workers}
        ranks = loaders(dataset, world_size, **options)
        batches = [[batch[0].tolist() for batch in one] for one in ranks]
        assert {len(one) for one in batches} == {len(ranks[0])}
        given = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(batches)))
        assert set(given) == set(range(count))
        assert len(given) - count < world_size, "only a step with too few samples is padded"


def test_batch_size_is_per_rank() -> None:
    ranks = loaders(TensorDataset(torch.arange(20)), 2, batch_size=3, global_batch_size=None)
    assert [len(batch[0]) for batch in ranks[1]] == [3, 3, 3, 1]
    assert ranks[0].batch_size == 3


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("sampler", ["torch's", "mixture", "generator"])
def test_state_of_any_rank_resumes_at_another_size(workers: int, sampler: str) -> None:
    dataset = Drawing()

    def ranks_of(world_size: int) -> list[Any]:
        options: dict[str, Any] = {"num_workers": workers, "remainder": "uneven"}
        if sampler == "mixture":
            order = MixtureSampler([60, 43], [1, 2], when_exhausted="leave_out")
            return loaders(dataset, world_size, sampler=order, shuffle=None, **options)
        if sampler == "generator":
            return [
                loaders(dataset, world_size, generator=torch.Generator().manual_seed(5), **options)[
                    rank
                ]
                for rank in range(world_size)
            ]
        return loaders(dataset, world_size, **options)

    alone = ranks_of(1)
    whole = [rows(alone) for _ in range(2)]
    state: dict[str, Any] | None = None
    given: list[Any] = []
    for world_size, step_count in [(4, 2), (2, 3), (1, 1), (3, 99)]:
        ranks = [ranks_of(world_size)[rank] for rank in range(world_size)]
        for one in ranks:
            if state is not None:
                one.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(one) for one in ranks]
        for _ in range(step_count):
            step = [next(iterator, None) for iterator in iterators]
            if step[0] is None:
                assert not any(batch is not None for batch in step)
                break
            given.append(torch.cat(step).tolist())  # type: ignore[arg-type]
        states = [json.dumps(one.state_dict(), sort_keys=True) for one in ranks]
        assert len(set(states)) == 1, "the state is the job's"
        state = json.loads(states[0])
    assert given == whole[0]
    for one in ranks:
        one.load_state_dict(json.loads(json.dumps(state)))
    assert rows(ranks) == whole[1], "the next epoch is the next one of the job"


@pytest.mark.long
@pytest.mark.slow
def test_resume_with_other_rank_count_and_fixed_batch_size() -> None:
    """The state counts samples: none is lost, and except for padding none is given twice."""
    rng = random.Random(4)
    dataset = TensorDataset(torch.arange(COUNT))
    for _ in range(8):
        state: dict[str, Any] | None = None
        given: list[int] = []
        is_over = False
        while not is_over:
            world_size = rng.choice([1, 2, 3, 5])
            ranks = loaders(
                dataset,
                world_size,
                batch_size=rng.choice([1, 4, 7]),
                global_batch_size=None,
                remainder="uneven",
                num_workers=rng.choice([0, 0, 1]),
            )
            for one in ranks:
                if state is not None:
                    one.load_state_dict(state)
            iterators = [iter(one) for one in ranks]
            for _ in range(rng.randrange(6)):
                step = [next(iterator, None) for iterator in iterators]
                is_over = step[0] is None
                if is_over:
                    break
                given.extend(torch.cat([batch[0] for batch in step]).tolist())  # type: ignore[index]
            state = ranks[-1].state_dict()
        assert set(given) == set(range(COUNT))
        assert len(given) < COUNT + world_size


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.slow
def test_rank_batches_from_a_pool_match_in_process(pool: PoolProcesses) -> None:
    expected = [batch.tolist() for batch in loaders(Drawing(), 3, num_workers=0)[1]]
    pool.start_worker()
    loader = loaders(Drawing(), 3, pool=pool.endpoint)[1]
    assert [batch.tolist() for batch in loader] == expected


def test_sample_seeding_is_independent_of_batch_size() -> None:
    def samples(batch_size: int, workers: int) -> Any:
        loader = DataLoader(
            DrawingWithGenerator(), batch_size, num_workers=workers, seeding="sample"
        )
        torch.manual_seed(7)
        return torch.cat(list(loader)).tolist()

    expected = samples(1, 0)
    assert samples(10, 0) == samples(7, 2) == expected
    assert len({tuple(row[1:]) for row in expected}) == COUNT


def test_user_sampler_gives_the_order_of_all_ranks() -> None:
    dataset = TensorDataset(torch.arange(24))
    order = list(reversed(range(24)))
    for workers in WORKERS:
        ranks = loaders(dataset, 2, sampler=order, shuffle=None, num_workers=workers)
        first = [torch.cat([batch[0] for batch in step]).tolist() for step in steps(ranks)]
        assert first == [order[:12], order[12:]]


def test_rank_is_taken_from_torchrun_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, ranks=Ranks())
    assert (loader.rank, loader.world_size, loader.remainder) == (2, 4, "pad")
    assert [batch[0].tolist() for batch in loader] == [[4, 5]]


def test_distributed_sampler_matches_torch() -> None:
    dataset = TensorDataset(torch.arange(17))

    def batches(loader_class: Any) -> list[list[int]]:
        sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
        return [batch[0].tolist() for batch in loader_class(dataset, 4, sampler=sampler)]

    assert batches(DataLoader) == batches(torch.utils.data.DataLoader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": Stream()}, "must be None for the IterableDataset Stream, got 12"),
        ({"batch_sampler": [[0]], "shuffle": None}, "requires batches that the loader makes"),
        ({"batch_size": None, "global_batch_size": None}, "batch_size is None"),
        ({"global_batch_size": 7}, "is 7 and there are 2 ranks.*choose a multiple of 2"),
        ({"global_batch_size": 1}, "global_batch_size must be 2 or more, got 1"),
        ({"batch_size": 4}, "batch_size is 4 and global_batch_size is 12; pass"),
        ({"remainder": "keep"}, "remainder must be one of 'pad', 'drop', 'uneven', got"),
        ({"seeding": "batch"}, r"seeding must be 'sample' with ranks=Ranks\(.*, got 'batch'"),
        ({"rank": 2}, "rank must be from 0 to world_size - 1, got rank=2 and world_size=2"),
        ({"sampler": iter([0]), "shuffle": None}, "but list_iterator has none"),
    ],
)
def test_unshardable_options_are_rejected(options: dict[str, Any], message: str) -> None:
    arguments = {"dataset": Drawing(), "shuffle": True, **options}
    of_ranks = {"global_batch_size": 12, "rank": 0}
    of_ranks.update(
        {
            name: arguments.pop(name)
            for name in ("global_batch_size", "remainder", "rank")
            if name in options
        }
    )
    if "shuffle" in options or isinstance(arguments["dataset"], IterableDataset):
        del arguments["shuffle"]
    if "batch_sampler" in options:
        del of_ranks["global_batch_size"]
    with pytest.raises(ValueError, match=message):
        DataLoader(**arguments, ranks=Ranks(world_size=2, **of_ranks))


def test_distributed_sampler_with_shard_by_rank_is_rejected() -> None:
    dataset = Drawing()
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1)
    with pytest.raises(
        ValueError, match="combined with a DistributedSampler, which already shards"
    ):
        DataLoader(dataset, sampler=sampler, ranks=Ranks(rank=1, world_size=2))


def test_state_of_sharded_loader_is_rejected_by_plain_loader() -> None:
    (one,) = loaders(Drawing(), 1)
    next(iter(one))
    plain = DataLoader(Drawing(), batch_size=12, sampler=RandomSampler(Drawing()))
    with pytest.raises(ValueError, match="build the loader as it was"):
        plain.load_state_dict(one.state_dict())


class Endless(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", WORKERS)
def test_unshuffled_share_of_endless_dataset_is_lazy(num_workers: int) -> None:
    def ranks() -> list[Any]:
        options: Any = {"shuffle": False, "global_batch_size": 4, "num_workers": num_workers}
        return loaders(Endless(), 2, **options)

    first = ranks()
    iterators = [iter(loader) for loader in first]
    assert [[next(i).tolist() for i in iterators] for _ in range(2)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    states = [loader.state_dict() for loader in first]
    resumed = ranks()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    assert [next(iter(loader)).tolist() for loader in resumed] == [[8, 9], [10, 11]]
