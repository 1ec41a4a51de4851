# SPDX-License-Identifier: Apache-2.0
"""``Ranks(share="by_cache")``: the steps of a job, whose samples go to the ranks that own them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import GlooRanks
from pool_datasets import CODE, Augmented
from pool_processes import pool_of
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from penstock import ChunkSampler, DataLoader, MixtureSampler, Pool, Ranks, cached

COUNT = 203
STEP = 24
JOB = Path(__file__).with_name("rank_job.py")


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """The index of a sample, and draws from all the generators."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, generator: Any = None) -> torch.Tensor:
        assert type(index) is int
        drawn = [index, torch.rand(()), np.random.random(), random.random()]
        drawn.append(torch.rand((), generator=generator))
        return torch.tensor(drawn, dtype=torch.float64)


def loaders(world_size: int, share: Any = "by_cache", **options: Any) -> list[Any]:
    options = {"dataset": Drawing(), "shuffle": True, "remainder": "uneven", **options}
    remainder = options.pop("remainder")
    return [
        DataLoader(
            ranks=Ranks(rank, world_size, global_batch_size=STEP, remainder=remainder, share=share),
            **options,
        )
        for rank in range(world_size)
    ]


def loader_of(
    rank: int, world_size: int, dataset: Any, share: Any = "by_cache", **options: Any
) -> Any:
    ranks = Ranks(rank, world_size, global_batch_size=STEP, remainder="uneven", share=share)
    return DataLoader(dataset, shuffle=True, ranks=ranks, **options)


def steps(ranks: list[Any], count: int | None = None) -> list[list[Any]]:
    """The batches of each step, one a rank."""
    zipped = zip(*ranks, strict=True)
    return [[batch.tolist() for batch in step] for step in itertools.islice(zipped, count)]


def together(found: list[list[Any]]) -> list[list[Any]]:
    """The samples of each step, over all ranks."""
    return [sorted(sum(step, [])) for step in found]


@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_steps_have_the_samples_and_draws_of_runs(world_size: int, remainder: Any) -> None:
    for workers in (0, 2) if world_size == 2 else (0,):
        by_run = loaders(world_size, None, remainder=remainder, num_workers=workers)
        by_cache = loaders(world_size, remainder=remainder, num_workers=workers)
        for _ in range(2):  # epochs
            expected, found = steps(by_run), steps(by_cache)
            assert together(found) == together(expected)
            assert found != expected
            assert [[*map(len, step)] for step in found] == [[*map(len, step)] for step in expected]


def test_ranks_get_what_they_own() -> None:
    ranks = loaders(4)
    for step in steps(ranks):
        size = sum(map(len, step))
        owned = [
            sum(loader.owner_of(int(row[0])) == rank for row in batch)
            for rank, (loader, batch) in enumerate(zip(ranks, step, strict=True))
        ]
        wanted = [0] * 4
        for row in sum(step, []):
            wanted[ranks[0].owner_of(int(row[0]))] += 1
        sizes = [*map(len, step)]
        assert owned == [min(*pair) for pair in zip(wanted, sizes, strict=True)]
        assert sum(owned) >= 0.6 * size
    owners = [ranks[0].owner_of(index) for index in range(COUNT)]
    assert owners == sorted(owners)
    assert {owners.count(rank) for rank in range(4)} <= {50, 51}


@pytest.mark.parametrize("share", ["by_cache", None])
def test_state_resumes_with_other_ranks(share: Any) -> None:
    expected = together(steps(loaders(1, None)))
    ranks = loaders(3)
    first = steps([iter(loader) for loader in ranks], 3)
    states = [loader.state_dict() for loader in ranks]
    assert states[0] == states[1] == states[2]
    resumed = loaders(4, share, num_workers=1)
    for loader in resumed:
        loader.load_state_dict(states[1])
    assert together(first + steps(resumed)) == expected


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Its own index; counts its calls."""

    def __init__(self) -> None:
        self.call_count = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        self.call_count += 1
        return torch.tensor([index])


@pytest.mark.parametrize("held_count", [13, 26, 51])
@pytest.mark.parametrize("share", ["by_cache", None])
def test_caches_hit_what_the_owners_predict(share: Any, held_count: int) -> None:
    probe = cached(Numbered(), memory="1MB")
    probe[0]
    sample_bytes = -(-probe.stats().bytes // 64) * 64
    caches = [cached(Numbered(), memory=held_count * sample_bytes) for _ in range(4)]
    owner_of = loaders(4, dataset=Numbered())[0].owner_of
    own = [{index for index in range(COUNT) if owner_of(index) == rank} for rank in range(4)]
    plain = loaders(4, None, dataset=Numbered())
    ranks = [loader_of(rank, 4, kept, share) for rank, kept in enumerate(caches)]
    held: list[set[int]] = [set() for _ in range(4)]
    hits = [0] * 4
    for epoch in range(4):
        found = steps(ranks)
        for step in found:
            for rank, batch in enumerate(step):
                for (index,) in batch:
                    hits[rank] += index in held[rank]
                    if len(held[rank]) < held_count and (index in own[rank] or share is None):
                        held[rank].add(index)
        assert together(found) == together(steps(plain))
        for rank, kept in enumerate(caches):
            stats = kept.stats()
            assert (stats.hits, stats.entries) == (hits[rank], len(held[rank]))
            made_count = kept.cached_dataset.call_count - stats.compared
            per_epoch = sum(len(step[rank]) for step in found)
            assert made_count + stats.hits == (epoch + 1) * per_epoch


def test_running_ranks_change_their_number() -> None:
    def seeded(rank: int, world_size: int, share: Any) -> Any:
        return loaders(world_size, share, generator=torch.Generator().manual_seed(3))[rank]

    expected = together(steps([seeded(0, 1, None)]))
    ranks = [seeded(rank, 2, "by_cache") for rank in range(2)]
    iterators = [iter(loader) for loader in ranks]
    first = steps(iterators, 4)
    ranks[0].reshard(0, 1)
    assert together(first + steps(iterators[:1])) == expected


@pytest.mark.parametrize("kind", ["mixture", "chunks", "list"])
def test_samplers_keep_their_order(kind: str) -> None:
    def make(share: Any) -> list[Any]:
        samplers = {
            "mixture": lambda: MixtureSampler([100, 103], [1, 2], when_exhausted="leave_out"),
            "chunks": lambda: ChunkSampler([20, 183], readers=2, batch_size=12),
            "list": lambda: [5, 5, 7, *range(40)],
        }
        return [
            loaders(2, share, shuffle=None, sampler=samplers[kind]())[rank] for rank in range(2)
        ]

    assert together(steps(make("by_cache"))) == together(steps(make(None)))


@pytest.mark.slow
def test_pool_makes_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(**options: Any) -> list[Any]:
        loader = loaders(2, dataset=Augmented(COUNT, 4), **options)[1]
        return [batch["x"].tolist() for batch in loader]

    expected = noise()
    for pool in pool_of(tmp_path, monkeypatch):
        pool.start_worker(processes=2)
        of_pool = Pool(pool.endpoint, code_paths=[CODE])
        assert noise(pool=of_pool) == expected


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_a_job_take_the_same_steps(tmp_path: Path, world_size: int) -> None:
    """Real ranks, with a sample and its draws in each row."""

    def run(share: str | None) -> list[list[Any]]:
        folder = tmp_path / str(share)
        folder.mkdir()
        job = GlooRanks(JOB, folder, world_size, {"share": share, "workers": int(world_size == 2)})
        job.finish_all()
        lines = [job.lines(rank) for rank in range(world_size)]
        return [
            [list(zip(indices, points, strict=True)) for _, indices, points, _ in step]
            for step in zip(*lines, strict=True)
        ]

    expected, found = run(None), run("by_cache")
    assert len(found) == 5
    assert together(found) == together(expected)
    assert found != expected


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class Plain(Dataset[Any]):
    """Samples of equal size, without draws."""

    fingerprint = "plain"

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index)


class Wrapped(Dataset[Any]):
    """Samples of a cache, at other indices."""

    def __init__(self, kept: Any, offset: int) -> None:
        self.kept, self.offset = kept, offset

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Any:
        return self.kept[(index + self.offset) % COUNT]


def is_stored(cache: Any, index: int) -> bool:
    before = cache.stats().hits
    cache[index]
    return bool(cache.stats().hits > before)


@pytest.mark.parametrize("workers", [0, 2])
def test_caches_store_what_the_rank_owns(workers: int) -> None:
    caches = [cached(Plain(), memory="1MB") for _ in range(4)]
    ranks = [
        loader_of(rank, 4, Wrapped(cache, 0), num_workers=workers)
        for rank, cache in enumerate(caches)
    ]
    for _ in range(4):
        steps(ranks)
    before = sum(cache.stats().hits for cache in caches)
    found = steps(ranks)
    hits = sum(cache.stats().hits for cache in caches) - before
    owned = sum(
        ranks[0].owner_of(int(row[0])) == rank
        for step in found
        for rank, batch in enumerate(step)
        for row in batch
    )
    assert 0.95 * owned <= hits <= owned
    for rank, cache in enumerate(caches):
        stored = [index for index in range(COUNT) if is_stored(cache, index)]
        assert {ranks[0].owner_of(index) for index in stored} == {rank}


def test_cache_that_counts_other_samples_stores_any() -> None:
    cache = cached(Plain(), memory="1MB")
    loader = loader_of(0, 4, Wrapped(cache, COUNT // 2))
    for _ in range(12):
        list(loader)
    stored = [index for index in range(COUNT) if is_stored(cache, index)]
    assert any(loader.owner_of(index) != 0 for index in stored)


def test_reshard_changes_what_a_cache_stores() -> None:
    cache = cached(Plain(), memory="1MB")
    loader = loader_of(0, 2, cache)
    next(iter(loader))
    loader.reshard(1, 2)
    for _ in range(4):
        list(loader)
    stored = [index for index in range(COUNT) if is_stored(cache, index)]
    assert sum(loader.owner_of(index) == 1 for index in stored) >= 40
    assert sum(loader.owner_of(index) == 0 for index in stored) <= STEP


def test_bounds_of_what_a_cache_stores_are_checked() -> None:
    cache = cached(Plain(), memory="1MB")
    for wrong in (range(0), range(5, 5), range(COUNT + 1), range(0, 10, 2), range(-1, 5)):
        with pytest.raises(ValueError, match="indices must be a range of step 1 within the"):
            cache.keep_only(wrong)


def test_loaders_that_cannot_share_by_cache_are_rejected() -> None:
    rows = TensorDataset(torch.arange(8))
    ranks = Ranks(0, 2, share="by_cache")
    with pytest.raises(ValueError, match="share must be None for the IterableDataset Numbers"):
        DataLoader(Numbers(), ranks=ranks, shards=2)
    with pytest.raises(ValueError, match="share must be 'by_cache' or None, got 'cache'"):
        Ranks(0, 2, share="cache")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampler of indices from 0 to 7, .* got 8"):
        next(iter(DataLoader(rows, ranks=ranks, sampler=range(7, 13))))
    with pytest.raises(ValueError, match=r"sampler of indices from 0 to 7, .* got \(1, 2\)"):
        next(iter(DataLoader(rows, ranks=ranks, sampler=[(1, 2)] * 8)))
    loader = DataLoader(rows, ranks=ranks)
    for index in (-1, 8):
        with pytest.raises(ValueError, match=f"index must be from 0 to 7, got {index}"):
            loader.owner_of(index)
    with pytest.raises(ValueError, match=r"owner_of\(\) requires ranks"):
        DataLoader(rows).owner_of(0)
    assert repr(ranks) == "Ranks(rank=0, world_size=2, share='by_cache')"
