# SPDX-License-Identifier: Apache-2.0
"""`loader.stats().ledger`: every second of a step is in exactly one place.

Nobody could tell what a trainer waited for: `stats()` had one number for all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from torch.utils.data import Dataset, IterableDataset, default_collate

from penstock import DataLoader
from penstock.loader.step_times import PARTS, StepTimes

pytestmark = pytest.mark.slow

_SAMPLE_S = 0.004
_COLLATE_S = 0.012
_STEP_S = 0.006


class Sleeping(Dataset[torch.Tensor]):
    def __init__(self, count: int, sample_s: float = _SAMPLE_S, slow: int | None = None) -> None:
        self.count, self.sample_s, self.slow = count, sample_s, slow

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.4 if index == self.slow else self.sample_s)
        return torch.full((3,), index)


class SleepingStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        for number in range(24):
            time.sleep(_SAMPLE_S)
            yield torch.full((3,), number)


def sleeping_collate(samples: Any) -> Any:
    time.sleep(_COLLATE_S)
    return default_collate(samples)


def sleeping_start(worker_id: int) -> None:
    time.sleep(0.5)


def trained(loader: Any, step_s: float = _STEP_S, epochs: int = 1) -> tuple[StepTimes, float]:
    """The ledger of some epochs, and how long the loops took by a clock of their own."""
    whole_s = 0.0
    for _ in range(epochs):
        began_at = time.perf_counter()
        for _ in loader:
            if step_s > 0:
                time.sleep(step_s)
        whole_s += time.perf_counter() - began_at
    return loader.stats().ledger, whole_s


def assert_sums(times: StepTimes, whole_s: float) -> None:
    assert times.total_s == pytest.approx(whole_s, rel=0.02)
    assert times.total_s == pytest.approx(sum(getattr(times, name) for name in PARTS))


def test_in_process_batches_are_the_datasets_and_the_collate_fns_time() -> None:
    loader = DataLoader(Sleeping(24), batch_size=4, collate_fn=sleeping_collate)
    times, whole_s = trained(loader)
    assert times.steps == 6
    assert times.compute_s >= 6 * _STEP_S
    assert 24 * _SAMPLE_S <= times.dataset_s <= whole_s - times.compute_s - times.collate_s
    assert times.collate_s >= 6 * _COLLATE_S
    assert times.worker_s == times.wire_s == times.order_s == 0
    assert_sums(times, whole_s)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_trainer_that_is_faster_than_its_worker_waits_for_the_dataset(seeding: str) -> None:
    loader = DataLoader(
        Sleeping(48), batch_size=4, num_workers=1, collate_fn=sleeping_collate, seeding=seeding
    )
    times, whole_s = trained(loader, step_s=0.0)
    assert times.steps == 12
    made_s = 48 * _SAMPLE_S + 12 * _COLLATE_S
    assert times.dataset_s + times.collate_s >= 0.9 * made_s
    assert times.dataset_s > 0.8 * 48 * _SAMPLE_S
    assert times.collate_s > 0.8 * 12 * _COLLATE_S
    assert times.waiting_share > 0.5  # workers start meanwhile
    assert_sums(times, whole_s)
    stats = loader.stats()
    assert stats.dataset_s >= 48 * _SAMPLE_S
    assert stats.collate_s >= 12 * _COLLATE_S
    assert stats.dataset_s + stats.collate_s + stats.prefix_s == pytest.approx(stats.fetch_s)


def test_a_trainer_that_is_slower_than_its_workers_waits_for_next_to_nothing() -> None:
    loader = DataLoader(Sleeping(40, 0.001), batch_size=4, num_workers=2, persistent_workers=True)
    times, whole_s = trained(loader, step_s=0.03, epochs=2)
    assert times.steps == 20
    assert times.compute_s >= 20 * 0.03
    assert_sums(times, whole_s)
    assert times.dataset_s + times.collate_s < 0.2 * times.compute_s


def test_a_batch_that_is_late_while_later_ones_are_here_is_a_wait_for_the_order() -> None:
    loader = DataLoader(Sleeping(32, 0.001, slow=8), batch_size=4, num_workers=2)
    times, whole_s = trained(loader, step_s=0.0)
    assert times.order_s > 0.3
    assert_sums(times, whole_s)
    free = DataLoader(Sleeping(32, 0.001, slow=8), batch_size=4, num_workers=2, in_order=False)
    assert trained(free, step_s=0.0)[0].order_s == 0


def test_workers_that_have_to_start_are_waited_for_as_workers() -> None:
    loader = DataLoader(
        Sleeping(8, 0.001), batch_size=4, num_workers=1, worker_init_fn=sleeping_start
    )
    times, whole_s = trained(loader, step_s=0.0)
    assert times.worker_s >= 0.45
    assert times.dataset_s < 0.1
    assert_sums(times, whole_s)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_is_waited_for_as_one_of_indices_is(num_workers: int) -> None:
    # In order, the wait for a worker that starts later than the other would be one for the order.
    loader = DataLoader(SleepingStream(), batch_size=4, num_workers=num_workers, in_order=False)
    times, whole_s = trained(loader, step_s=0.0)
    assert times.dataset_s > 0.7 * 24 * _SAMPLE_S
    assert_sums(times, whole_s)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.mark.long
def test_batches_of_a_pool_are_told_apart_and_its_controller_knows_the_parts(
    pool: PoolProcesses,
) -> None:
    pool.start_worker()
    loader = DataLoader(Sleeping(400), batch_size=4, pool=pool.endpoint)
    batches = iter(loader)
    for _ in range(50):
        next(batches)
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        told = [one["ledger"] for one in pool.status()["trainers"]]
        if told and told[0]["steps"] > 0:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    times = loader.stats().ledger
    assert times.dataset_s > 0.5 * 50 * 4 * _SAMPLE_S
    assert 0 < told[0]["dataset_s"] <= times.dataset_s + 1e-6
    assert set(told[0]) == {"steps", *PARTS}


def test_each_worker_has_its_part_and_slow_samples_have_their_index() -> None:
    loader = DataLoader(Sleeping(32, 0.001, slow=9), batch_size=4, num_workers=2)
    list(loader)
    stats = loader.stats()
    assert sorted(stats.workers) == [0, 1]
    assert sum(worker.batches for worker in stats.workers.values()) == 8
    assert sum(worker.dataset_s for worker in stats.workers.values()) == pytest.approx(
        stats.dataset_s
    )
    assert stats.slow_samples[0].index == 9
    assert stats.slow_samples[0].seconds >= 0.4
    assert str(stats.slow_samples[0]).startswith("sample 9 took 4")


@pytest.mark.parametrize("collate", [None, sleeping_collate])
def test_a_slow_sample_has_its_index_in_process_and_with_a_collate_fn(
    collate: Callable[[Any], Any] | None,
) -> None:
    for num_workers in (0, 1):
        loader = DataLoader(
            Sleeping(32, 0.001, slow=9), batch_size=4, num_workers=num_workers, collate_fn=collate
        )
        list(loader)
        slowest = loader.stats().slow_samples[0]
        assert slowest.index == 9 and slowest.seconds >= 0.39, (num_workers, slowest)


def test_samples_that_nobody_times_one_by_one_are_named_by_their_batch() -> None:
    for num_workers in (0, 1):
        loader = DataLoader(SleepingStream(), batch_size=4, num_workers=num_workers)
        list(loader)
        slowest = loader.stats().slow_samples[0]
        assert slowest.index is None and slowest.place is None
        assert slowest.seconds >= 4 * _SAMPLE_S
        assert str(slowest).startswith(f"the samples of batch {slowest.batch} took ")


def test_what_was_counted_is_kept_when_a_loader_goes_on_and_differences_are_of_a_window() -> None:
    loader = DataLoader(Sleeping(16, 0.001), batch_size=4, num_workers=1)
    first, _ = trained(loader)
    both, _ = trained(loader)
    assert both.steps == 8
    window = both - first
    assert window.steps == 4
    assert window.total_s == pytest.approx(both.total_s - first.total_s)
    assert "computing" in str(window) and "(" in str(window)


def test_a_loader_that_has_given_nothing_says_so() -> None:
    assert str(DataLoader(Sleeping(4)).stats().ledger) == "no step has been counted"
