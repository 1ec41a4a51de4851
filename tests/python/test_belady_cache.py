# SPDX-License-Identifier: Apache-2.0
"""`penstock.BeladyCache`: its misses equal Belady's rule with the whole future."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import BeladyCache, DataLoader


def misses_of_offline_rule(keys: list[int], capacity: int) -> int:
    """Belady's rule, by searching all later reads for every decision."""
    kept: set[int] = set()
    misses = 0
    for place, key in enumerate(keys):
        misses += key not in kept
        kept.add(key)
        if len(kept) > capacity:
            later = keys[place + 1 :]
            kept.remove(max(kept, key=lambda k: later.index(k) if k in later else len(keys)))
    return misses


def random_steps(count: int, size: int, keys: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, keys + 1)
    return [torch.multinomial(weights, size, generator=draws) for _ in range(count)]


@pytest.mark.parametrize("capacity", [0, 1, 8, 30, 100])
def test_misses_equal_the_offline_rule_if_all_is_known(capacity: int) -> None:
    steps = random_steps(40, 12, 100)
    cache = BeladyCache(capacity)
    for number, step in enumerate(steps):
        cache.read(step, steps[number + 1 :])
    assert cache.misses == misses_of_offline_rule(torch.cat(steps).tolist(), capacity)
    assert cache.hits + cache.misses == 480
    assert len(cache) <= capacity


@pytest.mark.parametrize("window", [0, 3, 100])
def test_rows_at_slots_are_those_of_the_keys(window: int) -> None:
    table = torch.rand(60, 4)
    cache, held = BeladyCache(20), torch.full((20, 4), torch.nan)
    steps = random_steps(80, 9, 60)
    kept: set[int] = set()
    for number, step in enumerate(steps):
        outcome = cache.read(step, steps[number + 1 : number + 1 + window])
        is_held = outcome.slots >= 0
        found = torch.empty(9, 4)
        found[is_held] = held[outcome.slots[is_held]]
        found[~is_held] = table[step[~is_held]]
        assert torch.equal(found, table[step])
        assert set(step[is_held].tolist()) == kept & set(step.tolist())
        is_kept = outcome.kept_slots >= 0
        held[outcome.kept_slots[is_kept]] = found[is_kept]
        kept = (kept - set(outcome.evicted.tolist())) | set(step[is_kept].tolist())
        assert torch.equal(cache.slots(step), outcome.kept_slots)
        assert len(kept) == len(cache)


@pytest.mark.slow
def test_lookahead_of_a_whole_epoch_is_the_optimum() -> None:
    ids = torch.cat(random_steps(24, 8, 50))
    loader = DataLoader(TensorDataset(ids), batch_size=8, num_workers=2, prefetch_factor=12)
    cache = BeladyCache(10)
    for (keys,) in loader:
        cache.read(keys, loader.lookahead(24, lambda batch: batch[0]))
    assert cache.misses == misses_of_offline_rule(ids.tolist(), 10)


def test_another_step_than_announced_is_read_as_it_is() -> None:
    cache = BeladyCache(1)
    cache.read([1], [[2], [1]])
    cache.read([3], [[3]])
    assert cache.slots([1, 3]).tolist() == [-1, 0]
    assert cache.read([3]).slots.tolist() == [0]


def test_sizes_count_against_the_capacity() -> None:
    cache = BeladyCache(10)
    cache.read([1, 2, 3], [[1, 3]], sizes=[6, 6, 4])
    assert cache.slots([1, 2, 3]).tolist() == [0, -1, 1]


def test_keys_of_any_integer_type_are_read() -> None:
    cache = BeladyCache(4)
    cache.read(np.array([1, 2], np.int32))
    assert cache.read(torch.tensor([2, 1], dtype=torch.uint8)).slots.tolist() == [1, 0]
    assert cache.read([]).slots.tolist() == []
    assert repr(cache) == "<BeladyCache of 2 keys, 2 hits, 2 misses>"
    assert cache.capacity == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.5],), "keys must be integers, got float64"),
        (([1], [["a"]]), "coming must be integers, got <U1"),
        (([1, 2], (), [1]), "sizes must have a size >= 1 for each of the 2 keys"),
        (([1], (), [0]), "sizes must have a size >= 1"),
    ],
)
def test_bad_keys_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeladyCache(2).read(*arguments)


@pytest.mark.parametrize("capacity", [-1, 2.5, True])
def test_bad_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity must be an int >= 0"):
        BeladyCache(capacity)
