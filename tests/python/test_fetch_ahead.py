# SPDX-License-Identifier: Apache-2.0
"""Threads of a worker that go on with later batches while the current one has slow samples."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced_threads import four_threads  # noqa: F401 - a fixture
from sample_datasets import Computed
from torch.utils.data import Dataset, default_collate

from penstock import DataLoader
from penstock.stream.batch_seeds import EpochSeeds
from penstock.worker.fetching import BatchPlace, FetchSpec, SeededFetcher
from penstock.worker.threaded_fetch import FetchPool

WAIT_S = 60.0
LATER_BATCH_MADE = threading.Event()
MADE: Counter[int] = Counter()  # of batches of four, in the process that makes them


def made(index: int) -> int:
    MADE[index // 4] += 1
    return MADE[index // 4]


def waits_for_the_next_batch(index: int) -> int:
    """The first sample of all waits until a later batch has been fetched as a whole."""
    if index == 0:
        assert LATER_BATCH_MADE.wait(WAIT_S), "no thread went on with the next batch"
    elif index >= 4 and made(index) == 4:
        LATER_BATCH_MADE.set()
    return index


def collated_inside(index: int) -> torch.Tensor:
    """As a collate_fn does, in the slab of the current batch."""
    return default_collate([torch.full((999,), float(waits_for_the_next_batch(index)))] * 4)


def fails_in_the_first_batch(index: int) -> int:
    if index == 1:
        raise ValueError("of the first batch")
    return waits_for_the_next_batch(index)


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    LATER_BATCH_MADE.clear()
    MADE.clear()


@pytest.mark.parametrize("options", [{}, {"seeding": "batch"}, {"seeding": "sample"}])
def test_idle_threads_go_on_with_the_next_batch(options: dict[str, Any]) -> None:
    dataset = Computed(16, waits_for_the_next_batch)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, fetch_threads=2, **options)
    with warnings.catch_warnings(action="error"):  # of draws that threads have made
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == torch.arange(16).view(4, 4).tolist()


def in_turn_with_the_next_batch(index: int) -> int:
    """The first sample of batch 20 waits, in each epoch, until batch 21 has been fetched."""
    made(index)
    if index == 80:
        epoch = MADE[20] // 4 + 1
        assert reaches(lambda: MADE[21] >= 4 * epoch), f"not fetched ahead in epoch {epoch}"
    return index


def reaches(is_reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not is_reached() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_reached()


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("fetch_threads", "seeding"), [(3, None), (3, "batch"), ("auto", None)])
def test_threads_go_on_with_later_batches_in_each_epoch_of_a_worker(
    fetch_threads: int | str, seeding: str | None
) -> None:
    """Also if the worker has started the epoch early, before its trainer did."""
    loader = DataLoader(
        Computed(160, in_turn_with_the_next_batch),
        batch_size=4,
        num_workers=1,
        prefetch_factor=4,
        fetch_threads=fetch_threads,
        seeding=seeding,
        persistent_workers=True,
    )
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == torch.arange(160).view(40, 4).tolist()


def test_tensors_collated_ahead_keep_their_values() -> None:
    loader = DataLoader(Computed(32, collated_inside), batch_size=4, num_workers=1, fetch_threads=4)
    for index, batch in enumerate(list(loader)):
        want = torch.arange(4 * index, 4 * index + 4.0)
        assert torch.equal(batch, want[:, None, None].expand(4, 4, 999))


def test_failing_sample_leaves_the_next_batch_alone() -> None:
    loader = DataLoader(
        Computed(16, fails_in_the_first_batch), batch_size=4, num_workers=1, fetch_threads=4
    )
    iterator = iter(loader)
    with pytest.raises(ValueError, match="of the first batch"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == torch.arange(16).view(4, 4)[1:].tolist()


class Drawing(Dataset[Any]):
    """The first sample of each batch is slow, so that later ones are fetched before it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> torch.Tensor:
        if index % 8 == 0:
            threading.Event().wait(0.02)
        return torch.rand(2, generator=generator)


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_generators_of_samples_fetched_ahead_are_those_of_their_places(seeding: Any) -> None:
    streams = []
    for threads in (1, 4):
        loader = DataLoader(
            Drawing(),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
            num_workers=2,
            prefetch_factor=3,
            fetch_threads=threads,
            seeding=seeding,
        )
        streams.append([batch for _ in range(2) for batch in loader])
    assert all(torch.equal(one, two) for one, two in zip(*streams, strict=True))


class Observed(Dataset[Any]):
    """Samples are whether the previous batch was complete when they were fetched."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> bool:
        is_complete = index < 4 or MADE[index // 4 - 1] == 4
        threading.Event().wait(0.05 if index % 4 == 0 else 0.0)
        made(index)
        return is_complete


class Stateful(Observed):
    def state_dict(self) -> dict[str, int]:
        return dict(MADE)

    def load_state_dict(self, state: dict[str, int]) -> None:
        MADE.update(state)


def collate_with_draws(samples: list[Any]) -> Any:
    return torch.tensor(samples)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("dataset", "options", "is_ahead"),
    [
        (Observed, {}, True),
        (Observed, {"collate_fn": collate_with_draws}, True),
        (Observed, {"collate_fn": collate_with_draws, "seeding": "batch"}, False),
        (Observed, {"fetch_threads": "auto"}, True),
        (Observed, {"fetch_threads": "auto", "collate_fn": collate_with_draws}, False),
        (Observed, {"fetch_threads": "auto", "seeding": "batch"}, False),
        (Stateful, {}, False),
    ],
)
def test_batches_are_fetched_ahead_only_where_it_cannot_be_observed(
    dataset: Any, options: dict[str, Any], is_ahead: bool
) -> None:
    settings = {"batch_size": 4, "num_workers": 1, "fetch_threads": 4, **options}
    in_turn = torch.cat(list(DataLoader(dataset(), **settings)))
    assert in_turn.all().item() is not is_ahead


def test_draws_of_samples_fetched_ahead_are_noticed() -> None:
    """Also those between two batches, which are in none of their fetches."""
    drawn, may_draw = threading.Event(), threading.Event()

    def function(index: int) -> float:
        if index != 2:
            return 0.0
        assert may_draw.wait(WAIT_S)
        number = float(torch.rand(()))
        drawn.set()
        return number

    spec = FetchSpec(0, Computed(4, function), True, default_collate, False, 4)
    pool = FetchPool(4)
    fetcher = SeededFetcher(spec, pool, {}, 1, EpochSeeds(7, 0), {}, lambda: None)
    places = [BatchPlace(0, 0, 0), BatchPlace(1, 0, 2)]
    announced = iter([places[1]])
    pool.look_ahead = lambda: [fetcher.expect([2, 3], place) for place in announced] and None
    fetcher.fetch([0, 1], places[0])
    assert not fetcher.threads_drew
    may_draw.set()
    assert drawn.wait(WAIT_S)
    fetcher.fetch([2, 3], places[1])
    assert fetcher.threads_drew
    pool.close()


def test_program_is_warned_of_draws_ahead() -> None:
    def function(index: int) -> float:
        return float(torch.rand(())) if index > 8 else 0.0

    loader = DataLoader(
        Computed(32, function), batch_size=4, num_workers=1, fetch_threads=4, seeding="batch"
    )
    with pytest.warns(UserWarning, match="samples drew from the global random generators"):
        list(loader)
    assert loader.stats().unrepeatable_batches > 0


class Running:
    """A function of samples that has them wait, and counts them."""

    def __init__(self) -> None:
        self.goes_on, self.started = threading.Event(), threading.Semaphore(0)
        self.begun: list[int] = []

    def __call__(self, index: int) -> int:
        self.begun.append(index)
        if index >= 10:
            self.started.release()
            assert self.goes_on.wait(WAIT_S)
        return index


def expect_once(pool: FetchPool, dataset: Any, indices: list[int], running: Running) -> None:
    """Announce a batch during the next fetch, which ends when two of its samples have started."""

    def look_ahead() -> None:
        pool.look_ahead = None
        pool.expect(dataset, indices)
        for _ in range(2):
            assert running.started.acquire(timeout=WAIT_S)

    pool.look_ahead = look_ahead


def test_another_batch_waits_for_samples_in_progress_and_drops_the_rest() -> None:
    running, pool = Running(), FetchPool(2)
    dataset = Computed(99, running)
    expect_once(pool, dataset, [10, 11, 12, 13], running)
    assert pool.fetch(dataset, [0, 1]) == [0, 1]
    threading.Timer(0.1, running.goes_on.set).start()
    assert pool.fetch(dataset, [2, 3]) == [2, 3]
    assert sorted(running.begun) == [0, 1, 2, 3, 10, 11]
    pool.close()


def test_expected_batch_is_returned_without_being_fetched_twice() -> None:
    running, pool = Running(), FetchPool(2)
    dataset = Computed(99, running)
    expect_once(pool, dataset, [10, 11, 12, 13], running)
    assert pool.fetch(dataset, [0, 1]) == [0, 1]
    running.goes_on.set()
    assert pool.fetch(dataset, [10, 11, 12, 13]) == [10, 11, 12, 13]
    assert sorted(running.begun) == [0, 1, 10, 11, 12, 13]
    pool.close()


def test_closed_pool_starts_no_expected_sample() -> None:
    running, pool = Running(), FetchPool(2)
    dataset = Computed(99, running)
    expect_once(pool, dataset, [10, 11, 12, 13], running)
    pool.fetch(dataset, [0, 1])
    threading.Timer(0.1, running.goes_on.set).start()
    pool.close()
    assert sorted(running.begun) == [0, 1, 10, 11]


def test_interrupt_starts_no_expected_sample() -> None:
    running, pool = Running(), FetchPool(2)
    dataset = Computed(99, running)
    pool.expect(dataset, [10, 11, 12, 13])

    def interrupt() -> None:
        for _ in range(2):
            assert running.started.acquire(timeout=WAIT_S)
        raise KeyboardInterrupt

    pool.look_ahead = interrupt
    with pytest.raises(KeyboardInterrupt):
        pool.fetch(dataset, [10, 11, 12, 13])
    pool.look_ahead = None
    threading.Timer(0.1, running.goes_on.set).start()
    with warnings.catch_warnings(action="error"):
        assert pool.fetch(dataset, [2, 3]) == [2, 3]
    assert sorted(running.begun) == [2, 3, 10, 11]
    pool.close()
