# SPDX-License-Identifier: Apache-2.0
"""Mixtures of sources: shares at every prefix, ends of sources, states, and loaders."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import pool_of
from torch.utils.data import ConcatDataset, TensorDataset

from penstock import DataLoader, MixtureSampler, Pool

LENGTHS = [40, 100, 7]


def source_of(index: int, lengths: list[int] = LENGTHS) -> int:
    for source, length in enumerate(lengths):
        if index < length:
            return source
        index -= length
    raise AssertionError("the index is beyond the last source")


@pytest.mark.parametrize("when_exhausted", ["stop", "repeat", "leave_out"])
def test_every_prefix_holds_each_source_in_proportion(when_exhausted: Any) -> None:
    rng = random.Random(3)
    for _ in range(40):
        lengths = [rng.randrange(1, 400) for _ in range(rng.randrange(1, 9))]
        weights = [2.0 ** -rng.randrange(8) * rng.randrange(1, 9) for _ in lengths]
        sampler = MixtureSampler(lengths, weights, when_exhausted=when_exhausted)
        counts = [0] * len(lengths)
        for n, index in enumerate(sampler, 1):
            counts[source_of(index, lengths)] += 1
            errors = [
                count - n * weight / sum(weights)
                for count, weight in zip(counts, weights, strict=True)
            ]
            assert max(map(abs, errors)) <= 1, (n, errors)
            ended = [count >= length for count, length in zip(counts, lengths, strict=True)]
            if when_exhausted == "leave_out" and any(ended):
                break


def test_stopping_epoch_yields_no_sample_twice() -> None:
    sampler = MixtureSampler(LENGTHS, [1, 1, 1])
    indices = list(sampler)
    assert len(indices) == len(set(indices)) == len(sampler)
    assert 20 <= len(indices) <= 24, "the third source is at its end"
    assert len(list(MixtureSampler(LENGTHS, [1, 1, 1], num_samples=10))) == 10


@pytest.mark.parametrize("when_exhausted", ["stop", "repeat", "leave_out"])
def test_length_is_the_number_of_samples(when_exhausted: Any) -> None:
    rng = random.Random(13)
    for _ in range(150):
        count = rng.randrange(1, 7)
        weights = [rng.choice([0, 1, 2, 5, 0.125, rng.random()]) for _ in range(count)]
        weights[rng.randrange(count)] = 1
        lengths = [rng.randrange(weight > 0, 60) for weight in weights]
        most = rng.choice([None, rng.randrange(200)])
        sampler = MixtureSampler(
            lengths, weights, when_exhausted=when_exhausted, num_samples=most, shuffle=False
        )
        assert len(sampler) == len(list(sampler)), (lengths, weights, most)
        others = [weight and rng.choice([1, 3, 0.25]) for weight in weights]
        sampler.set_weights(others)
        assert len(sampler) == len(list(sampler)), (lengths, others, most)


def test_length_of_long_sources_is_computed_without_iterating() -> None:
    """tqdm and len(loader) took seconds for millions of samples, at each call."""
    sampler = MixtureSampler([2**40] * 1024, [1] * 1024)
    assert len(sampler) == 1024 * 2**40
    assert len(MixtureSampler([10**15, 1], [1, 0], num_samples=10**12)) == 10**12


def test_leaving_out_ended_sources_yields_every_sample_once() -> None:
    sampler = MixtureSampler(LENGTHS, [1, 1, 5], when_exhausted="leave_out")
    assert sorted(sampler) == list(range(147))
    assert len(sampler) == 147


def test_repeated_source_is_reshuffled_in_each_pass() -> None:
    sampler = MixtureSampler(LENGTHS, [1, 1, 1], when_exhausted="repeat", num_samples=63)
    last = [index - 140 for index in sampler if index >= 140]
    passes = [last[:7], last[7:14], last[14:]]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len(set(map(tuple, passes))) == 3
    in_sequence = MixtureSampler(
        LENGTHS, [0, 0, 1], when_exhausted="repeat", num_samples=14, shuffle=False
    )
    assert list(in_sequence) == [*range(140, 147), *range(140, 147)]


def test_weights_default_to_the_lengths() -> None:
    assert Counter(map(source_of, MixtureSampler(LENGTHS))) == Counter({0: 40, 1: 100, 2: 7})


def test_epochs_differ_and_set_epoch_selects_one() -> None:
    sampler = MixtureSampler(LENGTHS)
    first, second = list(sampler), list(sampler)
    assert first != second and sorted(first) == sorted(second)
    sampler.set_epoch(1)
    assert list(sampler) == second
    assert list(MixtureSampler(LENGTHS, seed=1)) != first


@pytest.mark.parametrize("when_exhausted", ["stop", "repeat", "leave_out"])
@pytest.mark.parametrize("given", [0, 1, 20, 21, 80, 147])
def test_state_resumes_where_it_was_taken(when_exhausted: Any, given: int) -> None:
    def make() -> MixtureSampler:
        return MixtureSampler(LENGTHS, [3, 3, 1], when_exhausted=when_exhausted)

    whole = make()
    expected = [list(whole), list(whole)]
    sampler = make()
    iterator = iter(sampler)
    for _ in range(given):
        next(iterator, None)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == (expected[0][given:] if given else expected[0])
    assert list(resumed) == expected[1]


def test_weights_can_change_at_a_checkpoint() -> None:
    sampler = MixtureSampler([1000, 1000], [1, 1])
    iterator = iter(sampler)
    before = [next(iterator) for _ in range(100)]
    resumed = MixtureSampler([1000, 1000], [1, 1])
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_weights([3, 1])
    after = iter(resumed)
    given = [next(after) for _ in range(100)]
    assert Counter(index // 1000 for index in given) == Counter({0: 75, 1: 25})
    assert len({*before, *given}) == 200
    assert resumed.weights == [3.0, 1.0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_set_first", [True, False])
@pytest.mark.parametrize("batch_count", [0, 10])
def test_weights_can_change_at_a_loader_state(
    batch_count: int, is_set_first: bool, workers: int
) -> None:
    """Loading the state silently restored the old weights."""
    sampler = MixtureSampler([1000, 1000], [1, 1])
    dataset = TensorDataset(torch.arange(2000))
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=workers)
    loader.state_dict()  # else the first has the batches that were asked for, of the old weights

    def take(count: int) -> list[int]:
        batches = iter(loader)
        return [index for _ in range(count) for index in next(batches)[0].tolist()]

    before = take(batch_count) if batch_count else []
    state = loader.state_dict()
    if is_set_first:
        sampler.set_weights([3, 1])
    loader.load_state_dict(state)
    if not is_set_first:
        sampler.set_weights([3, 1])
    after = take(10)
    assert Counter(index // 1000 for index in after) == Counter({0: 75, 1: 25})
    assert len({*before, *after}) == len(before) + 100


def test_setting_equal_weights_keeps_the_resumed_schedule() -> None:
    def make() -> MixtureSampler:
        sampler = MixtureSampler(LENGTHS, [1, 2, 1], when_exhausted="repeat")
        sampler.set_weights([2, 3, 1])
        return sampler

    sampler = make()
    iterator = iter(sampler)
    for _ in range(20):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert list(resumed) == list(iterator)


def test_loader_stream_is_the_same_for_any_worker_count() -> None:
    dataset = ConcatDataset(
        [TensorDataset(torch.arange(length) + 1000 * length) for length in LENGTHS]
    )

    def batches(loader_class: Any, workers: int) -> list[list[int]]:
        sampler = MixtureSampler(LENGTHS, [1, 2, 1], when_exhausted="repeat")
        loader = loader_class(dataset, batch_size=8, sampler=sampler, num_workers=workers)
        return [batch[0].tolist() for _ in range(2) for batch in loader]

    expected = batches(torch.utils.data.DataLoader, 0)
    for workers in (0, 1, 7):
        assert batches(DataLoader, workers) == expected


@pytest.mark.slow
@pytest.mark.long("16", "3")
@pytest.mark.parametrize("worker_count", [3, 16])
def test_pool_stream_matches_a_single_process(
    worker_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With only the trainer's local worker in addition to the pool, and with so many of the
    pool."""
    dataset = ConcatDataset(
        [TensorDataset(torch.arange(length) + 1000 * length) for length in LENGTHS]
    )

    def batches(**options: Any) -> list[list[int]]:
        sampler = MixtureSampler(LENGTHS, [1, 2, 1], when_exhausted="repeat")
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, **options)
        return [batch[0].tolist() for _ in range(2) for batch in loader]

    expected = batches()
    for pool in pool_of(tmp_path, monkeypatch):
        options = {"pool": Pool(pool.endpoint, code_paths=None), "timeout": 60}
        assert batches(num_workers=1, **options) == expected
        pool.start_worker(processes=worker_count)
        assert batches(**options) == expected, f"{worker_count} workers of the pool"


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_within_an_epoch(workers: int) -> None:
    dataset = ConcatDataset([TensorDataset(torch.arange(length)) for length in LENGTHS])

    def make() -> Any:
        sampler = MixtureSampler(LENGTHS, [1, 2, 1], when_exhausted="leave_out")
        return DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers)

    expected = [batch[0].tolist() for batch in make()]
    loader = make()
    iterator = iter(loader)
    given = [next(iterator)[0].tolist() for _ in range(5)]
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert given + [batch[0].tolist() for batch in resumed] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "lengths must have 1 to .* sources, got 0"),
        (([3, -1],), "lengths must be >= 0, got -1 for source 1"),
        (([3, 4], [1]), "one number for each of the 2 sources, got 1"),
        (([3, 4], [1, -2]), "weights must be finite and >= 0, got -2.0 for source 1"),
        (([3, 4], [1, float("nan")]), "got nan for source 1"),
        (([3, 4], [0, 0]), "at least one weight must be > 0, got only 0"),
        (([3, 0], [1, 1]), "source 1 has weight 1.0 and no samples"),
    ],
)
def test_invalid_sources_and_weights_are_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureSampler(*arguments)


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(ValueError, match="when_exhausted must be one of 'stop', .*, got 'end'"):
        MixtureSampler([3], when_exhausted="end")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_samples must be >= 0, got -1"):
        MixtureSampler([3], num_samples=-1)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        MixtureSampler([3], seed=-1)


def test_state_of_other_sources_is_rejected() -> None:
    state = MixtureSampler([3, 4]).state_dict()
    with pytest.raises(ValueError, match=r"with lengths \[3, 4\], but this one has lengths \[3\]"):
        MixtureSampler([3]).load_state_dict(state)
    state["shares"][0] += 1
    with pytest.raises(ValueError, match="load a result of state_dict"):
        MixtureSampler([3, 4]).load_state_dict(state)
