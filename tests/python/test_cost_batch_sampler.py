# SPDX-License-Identifier: Apache-2.0
"""Batches by cost: budgets, equal ranks, states at any number of ranks, and loaders."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import CostBatchSampler, DataLoader


def lengths(count: int, seed: int = 0, sigma: float = 1.0) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).lognormal(np.log(300), sigma, count)
    return np.minimum(np.ceil(drawn), 2048)


def ranks(costs: Any, world_size: int, **options: Any) -> list[CostBatchSampler]:
    return [
        CostBatchSampler(costs, 4096, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_every_sample_is_accounted_for(world_size: int, remainder: str) -> None:
    costs = lengths(1003)
    samplers = ranks(costs, world_size, remainder=remainder)
    batches = [list(sampler) for sampler in samplers]
    assert len({len(one) for one in batches}) == 1
    assert {len(sampler) for sampler in samplers} == {len(batches[0])}
    given = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(batches)))
    padded, dropped = samplers[0].padded, samplers[0].dropped
    assert sorted(given + dropped) == sorted([*range(1003), *padded])
    assert all(costs[batch].sum() <= 4096 for one in batches for batch in one)
    assert all(batch for one in batches for batch in one)


def test_eight_ranks_get_batches_of_similar_cost() -> None:
    costs = lengths(20000)
    batches = [list(sampler) for sampler in ranks(costs, 8)]
    ratios = []
    for step in list(zip(*batches, strict=True))[:-1]:
        loads = [costs[batch].sum() for batch in step]
        ratios.append(max(loads) / np.mean(loads))
    assert np.mean(ratios) <= 1.05


@pytest.mark.parametrize("seed", range(5))
def test_last_steps_also_have_batches_of_similar_cost(seed: int) -> None:
    """A few samples were left to the last step, where one rank had most of the cost, or all."""
    costs = lengths(3000, seed)
    batches = [
        list(CostBatchSampler(costs, 8192, rank=rank, world_size=8, seed=seed)) for rank in range(8)
    ]
    for step in zip(*batches, strict=True):
        loads = [costs[batch].sum() for batch in step]
        assert max(loads) / np.mean(loads) <= 1.05


def test_step_with_fewer_samples_than_ranks_is_padded_or_dropped() -> None:
    padded = ranks([4000.0] * 5, 4, shuffle=False)
    assert [list(sampler) for sampler in padded] == [[[0], [4]], [[1], [4]], [[2], [4]], [[3], [4]]]
    assert padded[3].padded == [4, 4, 4]
    dropped = ranks([4000.0] * 5, 4, shuffle=False, remainder="drop")
    assert [list(sampler) for sampler in dropped] == [[[0]], [[1]], [[2]], [[3]]]
    assert dropped[0].dropped == [4]
    assert len(dropped[0]) == 1


def test_epochs_differ_and_set_epoch_selects_one() -> None:
    sampler = CostBatchSampler(lengths(200), 4096)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


@pytest.mark.parametrize("seed", range(5))
def test_state_resumes_with_another_number_of_ranks(seed: int) -> None:
    """The job is stopped again and again, and resumed with other ranks from any rank's state."""
    rng = random.Random(seed)
    costs = lengths(700, seed)
    given: list[int] = []
    padded: list[int] = []
    state: dict[str, Any] | None = None
    is_over = False
    while not is_over:
        samplers = ranks(costs, rng.choice([1, 2, 3, 4, 8]))
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(rng.randrange(8)):
            step = [next(iterator, None) for iterator in iterators]
            is_over = step[0] is None
            assert all((batch is None) == is_over for batch in step)
            given.extend(itertools.chain.from_iterable(batch or [] for batch in step))
        padded += samplers[0].padded
        states = [json.dumps(sampler.state_dict()) for sampler in samplers]
        assert len(set(states)) == 1, "the state is the job's"
        state = json.loads(states[0])
    assert sorted(given) == sorted([*range(700), *padded])


def test_resume_with_the_same_ranks_yields_the_same_batches() -> None:
    costs = lengths(400)
    expected = list(ranks(costs, 2)[1])
    sampler = ranks(costs, 2)[0]
    iterator = iter(sampler)
    for _ in range(4):
        next(iterator)
    resumed = ranks(costs, 2)[1]
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == expected[4:]
    assert len(resumed) == len(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_yields_the_sampler_batches_and_resumes(workers: int) -> None:
    costs = lengths(300)
    dataset = TensorDataset(torch.arange(300))

    def make(loader_class: Any = DataLoader) -> Any:
        sampler = CostBatchSampler(costs, 4096, rank=1, world_size=2, batch_size_max=9)
        return loader_class(dataset, batch_sampler=sampler, num_workers=workers)

    expected = [batch[0].tolist() for batch in make(torch.utils.data.DataLoader)]
    assert max(map(len, expected)) == 9
    loader = make()
    iterator = iter(loader)
    given = [next(iterator)[0].tolist() for _ in range(5)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert given + [batch[0].tolist() for batch in resumed] == expected


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ([1, 0], {}, "costs must be positive and finite, got 0.0 for sample 1"),
        ([1, float("inf")], {}, "got inf for sample 1"),
        ([1, 5000, 9000], {}, r"budget \(4096\), got 5000 for sample 1 \(2 samples"),
        ([[1]], {}, r"costs must be one number per sample, got the shape \(1, 1\)"),
        ([1], {"rank": 2, "world_size": 2}, "0 <= rank < world_size, got rank=2 and world_size=2"),
        ([1], {"rank": 0}, "got rank=0 and world_size=None; pass both"),
        ([1], {"batch_size_max": 0}, "batch_size_max must be >= 1 or None, got 0"),
        ([1], {"remainder": "keep"}, "remainder must be .*, got 'keep'"),
        ([1], {"seed": -3}, "seed must be >= 0, got -3"),
    ],
)
def test_invalid_arguments_are_rejected(costs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostBatchSampler(costs, 4096, **options)


def test_zero_budget_is_rejected() -> None:
    with pytest.raises(ValueError, match="budget must be positive and finite, got 0"):
        CostBatchSampler([1], 0)


def test_rank_is_read_from_the_torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = CostBatchSampler([1.0] * 9, 2)
    assert (sampler.rank, sampler.world_size) == (1, 3)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="must be integers, as torchrun sets them, got RANK='one'"):
        CostBatchSampler([1.0] * 9, 2)


def test_state_of_other_costs_is_rejected() -> None:
    state = CostBatchSampler([1.0, 2.0], 4).state_dict()
    with pytest.raises(ValueError, match="with sample_count 2, but this one has sample_count 1"):
        CostBatchSampler([1.0], 4).load_state_dict(state)
