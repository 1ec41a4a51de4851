# SPDX-License-Identifier: Apache-2.0
"""States with ``in_order=False``: after a resume exactly the undelivered batches arrive. A loader
with workers in free order had no state at all."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE
from pool_processes import pool_of
from resumed_streams import (
    COUNT,
    SAMPLERS,
    Augmented,
    Counted,
    Counting,
    Remembering,
    Shards,
    StatefulSampler,
    WithCursor,
    jittered,
    seed_all,
    take,
    through_json,
    whole,
)
from stream_oracle import describe, error_of
from torch.utils.data import Dataset, TensorDataset

from penstock import DataLoader, Pool

FREE: dict[str, Any] = {"in_order": False}


class Uneven(Augmented):
    """Some samples take as long as many others, so that the others overtake them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        numbers = random.Random(seed)
        self.delays_s = [numbers.choice([0.0, 0.0, 0.0, 0.001, 0.01]) for _ in range(COUNT)]

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.delays_s[index])
        return super().__getitem__(index)


class Indices(Uneven):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


class Held(Dataset[int]):
    """The samples of ``held`` are made once the trainer allows it."""

    def __init__(self, held: set[int], count: int = 12) -> None:
        self.held = held
        self.count = count
        self.reader, self.writer = os.pipe()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.held:
            os.read(self.reader, 1)
        return index

    def let_go(self) -> None:
        os.write(self.writer, b"!" * len(self.held))

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def held() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(*held: int, count: int = 12) -> Held:
        made.append(Held(set(held), count))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def seen_of(batches: list[Any]) -> list[str]:
    return sorted(map(repr, batches))


def assert_resumes_after_every_step(
    make: Callable[[], Any], again: Callable[[], Any], stride: int | None = None
) -> None:
    """A state after each batch (if few), loaded into another loader, and a state of that loader."""
    expected = seen_of(whole(make))
    seed_all(7)
    loader = make()
    iterator = iter(loader)
    delivered: list[Any] = []
    stride = stride or (1 if len(expected) < 16 else 4)
    for step in range(len(expected) + 1):
        if step % stride != 1 % stride:
            delivered += take(iterator, 1)
            continue
        state = through_json(loader.state_dict())
        assert state["_num_yielded"] == state["_sampler_iter_yielded"] == step
        seed_all(1000 + step)
        second = again()
        second.load_state_dict(state)
        resumed = iter(second)
        some = take(resumed, min(2, len(expected) - step))
        state = through_json(second.state_dict())
        third = again()
        third.load_state_dict(state)
        rest = take(iter(third), 99)
        assert seen_of([*delivered, *some, *rest]) == expected, f"after {step} batches"
        assert seen_of(take(resumed, 99)) == seen_of(rest)
        delivered += take(iterator, 1)
    assert seen_of(delivered) == expected


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_resume_delivers_exactly_the_undelivered_batches(
    options: Callable[[], dict[str, Any]], workers: int
) -> None:
    def make() -> Any:
        return DataLoader(Indices(workers), **{**options(), "num_workers": workers, **FREE})

    assert_resumes_after_every_step(make, make)


@pytest.mark.long(
    "{'num_workers': 1, 'fetch_threads': 3, '*", "{'num_workers': 3, 'in_order': False}-sa*"
)
@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize(
    "again",
    [
        {"num_workers": 3, **FREE},
        {"num_workers": 2},
        {"num_workers": 0},
        {"num_workers": "auto"},
        {"num_workers": 1, "fetch_threads": 3, **FREE},
    ],
    ids=str,
)
def test_late_seeded_batches_are_bit_identical_after_resume(
    again: dict[str, Any], seeding: str
) -> None:
    # Threads share the generators that samples draw from, so those samples do not draw.
    has_threads = "fetch_threads" in again
    common: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seeding": seeding}
    if seeding == "batch" and not has_threads:
        common["collate_fn"] = jittered

    def make(**options: Any) -> Any:
        return DataLoader(Indices() if has_threads else Uneven(3), **common, **options)

    assert_resumes_after_every_step(lambda: make(num_workers=3, **FREE), lambda: make(**again))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_tensor_rows_are_delivered_once(workers: int) -> None:
    dataset = TensorDataset(torch.arange(40))

    def make() -> Any:
        return DataLoader(dataset, 3, shuffle=True, num_workers=workers, **FREE)

    assert_resumes_after_every_step(make, make)


def held_back(dataset: Held, **options: Any) -> tuple[Any, list[int]]:
    """A loader whose first worker is held at sample 0, and the batches of the other one
    meanwhile."""
    loader: Any = DataLoader(
        dataset,
        **{"batch_size": None, "num_workers": 2, "prefetch_factor": 1, **FREE, **options},
    )
    iterator = iter(loader)
    given = [int(next(iterator)) for _ in range(5)]
    state = through_json(loader.state_dict())
    dataset.let_go()
    del iterator
    return state, given


def test_overtaken_batches_are_requested_first_after_resume(held: Callable[..., Held]) -> None:
    state, given = held_back(held(0))
    assert given == [1, 2, 3, 4, 5]
    assert state["left"] == {"through": 6, "missing": [0]}
    assert state["_sampler_iter_yielded"] == 5
    for options in ({"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}):
        loader: Any = DataLoader(held(), batch_size=None, **options)
        loader.load_state_dict(state)
        assert [int(value) for value in loader] == [0, 6, 7, 8, 9, 10, 11]
        assert [int(value) for value in loader] == [*range(12)], "the next epoch is a whole one"


def test_state_lists_missing_batches_until_delivered(held: Callable[..., Held]) -> None:
    state, _ = held_back(held(0, 2, count=14), num_workers=3)
    assert state["left"]["missing"] == [0, 2]
    for workers in (0, 1):
        loader: Any = DataLoader(held(count=14), batch_size=None, num_workers=workers)
        loader.load_state_dict(state)
        iterator = iter(loader)
        assert through_json(loader.state_dict())["left"] == state["left"]
        assert int(next(iterator)) == 0
        assert loader.state_dict()["left"]["missing"] == [2]
        assert int(next(iterator)) == 2
        after = loader.state_dict()
        assert "left" not in after and after["version"] == 1
        assert after["_sampler_iter_yielded"] == state["left"]["through"]


def test_lookahead_after_resume_shows_overtaken_batches_first(
    held: Callable[..., Held],
) -> None:
    state, _ = held_back(held(0), batch_size=1)
    loader: Any = DataLoader(held(), batch_size=1)
    loader.load_state_dict(state)
    iterator = iter(loader)
    assert loader.lookahead(3) == [[0], [6], [7]]
    assert [int(value) for value in iterator] == [0, 6, 7, 8, 9, 10, 11]


def test_ordered_state_resumes_unordered() -> None:
    loader: Any = DataLoader(Counted(), 4, num_workers=2)
    iterator = iter(loader)
    given = take(iterator, 2)
    again: Any = DataLoader(Counted(), 4, num_workers=2, **FREE)
    again.load_state_dict(through_json(loader.state_dict()))
    assert seen_of([*given, *take(iter(again), 99)]) == seen_of(whole(lambda: loader))


def test_unordered_state_stays_small(held: Callable[..., Held]) -> None:
    dataset = held(0, count=4000)
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=2, **FREE)
    iterator = iter(loader)
    before = len(json.dumps(loader.state_dict()))
    for _ in range(3500):
        next(iterator)
    state = loader.state_dict()
    dataset.let_go()
    missing = state["left"]["missing"]
    assert missing[0] == 0 and len(missing) <= 4, "no more than were asked for and have not come"
    assert len(json.dumps(state)) < before + 100


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_persistent_workers_start_whole_epochs_after_resume(seeding: str) -> None:
    loader: Any = DataLoader(
        Indices(), 2, num_workers=3, persistent_workers=True, seeding=seeding, **FREE
    )
    expected = seen_of(take(iter(loader), 99))
    iterator = iter(loader)
    given = take(iterator, 4)
    state = through_json(loader.state_dict())
    loader.load_state_dict(state)
    assert seen_of([*given, *take(iter(loader), 99)]) == expected
    assert loader.state_dict()["_iterator_finished"]
    assert seen_of(take(iter(loader), 99)) == expected


class UnevenShards(Shards):
    def __iter__(self) -> Iterator[Any]:
        for place, sample in enumerate(super().__iter__()):
            time.sleep(0.01 if place % 5 == 2 else 0.0)
            yield sample[0]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("dataset", [UnevenShards, Remembering, WithCursor])
def test_iterable_shards_resume_at_their_positions(
    dataset: type, seeding: str, workers: int
) -> None:
    def make() -> Any:
        return DataLoader(dataset(), 3, num_workers=workers, seeding=seeding, **FREE)

    assert_resumes_after_every_step(make, make)


@pytest.mark.long
@pytest.mark.slow
def test_random_shards_resume_bit_identically() -> None:
    def make(workers: int, **options: Any) -> Any:
        return DataLoader(
            Shards(),
            batch_size=3,
            seeding="batch",
            shards=3,
            num_workers=workers,
            collate_fn=jittered,
            **options,
        )

    assert_resumes_after_every_step(lambda: make(3, **FREE), lambda: make(1, **FREE))


@pytest.mark.long
@pytest.mark.slow
def test_unordered_pool_state_resumes_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pool in pool_of(tmp_path, monkeypatch):
        pool.start_worker(processes=2)
        workers = {"pool": Pool(pool.endpoint, code_paths=[CODE]), "timeout": 60}
        for options in (
            {"dataset": Uneven(5), "shuffle": True},
            {"dataset": Shards(), "shards": 3},
        ):

            def make(**others: Any) -> Any:
                return DataLoader(batch_size=3, **{"seeding": "batch", **options, **others})  # noqa: B023

            for again in ({**workers, **FREE}, {}):
                assert_resumes_after_every_step(
                    lambda: make(**workers, **FREE),  # noqa: B023
                    lambda again=again: make(**again),
                    stride=4,
                )


def test_failed_batch_is_repeated_after_resume() -> None:
    """In free order its place is not known to the trainer."""

    def make() -> Any:
        return DataLoader(Counted(9, failing=4), batch_size=None, num_workers=2, **FREE)

    loader = make()
    expected = seen_of(take(iter(loader), 99))
    iterator = iter(loader)
    given = take(iterator, 7)
    again = make()
    again.load_state_dict(through_json(loader.state_dict()))
    rest = take(iter(again), 99)
    assert "sample 4" in rest
    assert seen_of([one for one in given if one != "sample 4"] + rest) == expected


def test_stateful_map_dataset_is_restored_in_each_worker() -> None:
    def make() -> Any:
        return DataLoader(Counting(), 2, num_workers=2, **FREE)

    loader = make()
    loader.state_dict()  # which worker made which batch is known from now on
    iterator = iter(loader)
    given = [next(iterator) for _ in range(6)]
    asked = [int(numbers[-1]) for _, numbers in given]
    state = through_json(loader.state_dict())
    states = [one["dataset"]["asked"] for one in state["shards"]["states"] if one]
    assert sum(states) == 12 and max(asked) in states
    again = make()
    again.load_state_dict(state)
    rest = list(again)
    indices = [int(index) for batch in [*given, *rest] for index in batch[0]]
    assert sorted(indices) == [*range(COUNT)]
    assert max(int(batch[1][-1]) for batch in rest) > min(states)


def test_stateful_sampler_resumes_at_first_missing_index(held: Callable[..., Held]) -> None:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(4)).tolist()
    dataset = held(order[7], count=COUNT)

    def make(dataset: Any, **options: Any) -> Any:
        return DataLoader(
            dataset, batch_size=None, sampler=StatefulSampler(), prefetch_factor=1, **options
        )

    loader = make(dataset, num_workers=2, **FREE)
    loader.state_dict()
    iterator = iter(loader)
    given = [int(next(iterator)) for _ in range(12)]
    state = through_json(loader.state_dict())
    dataset.let_go()
    assert state["left"] == {"through": 13, "missing": [7]}
    assert state["_index_sampler_state"]["index_sampler"] == {"yielded": 7}
    again = make(held(count=COUNT), num_workers=1)
    again.load_state_dict(state)
    assert [int(value) for value in again] == [order[7], *order[13:]]
    assert sorted(given) == sorted([*order[:7], *order[8:13]])
    assert again.sampler.pulls == COUNT - 7


def test_adjusted_unordered_state_is_rejected(held: Callable[..., Held]) -> None:
    """accelerate returns the batches that it holds; in free order the last are not known."""
    state, _ = held_back(held(0))
    state["_sampler_iter_yielded"] -= 1
    loader: Any = DataLoader(held(), batch_size=None)
    error = error_of(lambda: loader.load_state_dict(state))
    assert type(error) is ValueError
    assert "is 4 but 5 batches were delivered, out of order" in str(error)


def test_requesting_a_state_does_not_change_the_stream() -> None:
    def drive(asks: bool) -> Any:
        seed_all(3)
        loader: Any = DataLoader(Counted(), 4, shuffle=True, num_workers=1, **FREE)
        seen = []
        for batch in loader:
            seen.append(describe(batch))
            if asks:
                loader.state_dict()
        return seen, describe(torch.get_rng_state())

    assert drive(True) == drive(False)


def test_first_state_includes_indices_of_overtaken_batches(
    held: Callable[..., Held],
) -> None:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(4)).tolist()
    dataset = held(order[7], count=COUNT)

    def make(dataset: Any, **options: Any) -> Any:
        return DataLoader(dataset, batch_size=None, sampler=StatefulSampler(), **options)

    loader = make(dataset, num_workers=2, prefetch_factor=1, **FREE)
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
    state = through_json(loader.state_dict())
    dataset.let_go()
    for options in ({"num_workers": 1}, {"num_workers": 0}, {"num_workers": 2, **FREE}):
        again = make(held(count=COUNT), **options)
        again.load_state_dict(state)
        assert sorted(int(value) for value in again) == sorted([order[7], *order[13:]])


class WithSlowOnes(Augmented):
    """A few samples take as long as hundreds of others."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.5 if index in (4, 37) else 0.001)
        return super().__getitem__(index)[0]


def overtakings(order: list[int]) -> int:
    """Return the most batches that were delivered before the oldest undelivered one."""
    left, most = sorted(order), 0
    for index in order:
        left.remove(index)
        if left:
            most = max(most, sum(one > left[0] for one in order[: order.index(index) + 1]))
    return most


@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_window_bounds_how_many_batches_overtake(window: int, seeding: str) -> None:
    def order(**options: Any) -> list[int]:
        loader = DataLoader(
            WithSlowOnes(), batch_size=None, num_workers=2, seeding=seeding, prefetch_factor=12,
            **options,
        )  # fmt: skip
        return [int(sample) for sample in loader]

    windowed, free = order(in_order=window), order(in_order=False)
    assert sorted(windowed) == sorted(free) == [*range(60)]
    assert overtakings(windowed) <= window
    assert overtakings(free) > window, "no batch was slow enough to be overtaken"
    assert overtakings(windowed) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [2, 4])
def test_state_with_a_window_resumes_exactly(window: int) -> None:
    def make(in_order: Any = window, workers: int = 3) -> Any:
        return DataLoader(
            Uneven(3), batch_size=2, shuffle=True, num_workers=workers, seeding="batch",
            in_order=in_order,
        )  # fmt: skip

    assert_resumes_after_every_step(make, make)
    assert_resumes_after_every_step(make, lambda: make(True, 0))


@pytest.mark.parametrize("window", [-1, 1 << 33])
def test_windows_that_bound_nothing_are_refused(window: int) -> None:
    error = error_of(lambda: DataLoader(Counted(), num_workers=1, in_order=window))
    assert type(error) is ValueError
    assert f"from 2 to 4294967295, got {window}" in str(error)


def test_in_order_of_0_and_1_is_torchs_and_0_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="in_order=0 means in_order=False"):
        free = DataLoader(WithSlowOnes(), batch_size=None, num_workers=2, in_order=0)
    ordered = DataLoader(WithSlowOnes(), batch_size=None, num_workers=2, in_order=1)
    assert overtakings([int(sample) for sample in free]) > 0
    assert [int(sample) for sample in ordered] == [*range(60)]
