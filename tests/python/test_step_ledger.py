# SPDX-License-Identifier: Apache-2.0
"""`loader.stats().ledger`: every second of a step is counted exactly once.

The cause of a trainer's wait was not visible: `stats()` had one number for all of it. How a wait is
shared out is tested with made-up instants (`step_ledger_test.cpp`); here are real loaders, whose
numbers are compared with one another, and with the times that the program and the dataset measure:
a nested measurement is never longer than the outer one.
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
from worker_gate import WorkerGate, wait_until_ready

from penstock import DataLoader
from penstock.loader.step_times import PARTS, SlowSample, StepTimes

pytestmark = pytest.mark.slow


@pytest.fixture
def gate() -> Iterator[WorkerGate]:
    made = WorkerGate()
    yield made
    made.close()


class Timed(Dataset[torch.Tensor]):
    """A sample is the seconds that it took. One of them, `late`, waits at a gate."""

    def __init__(self, count: int, gate: WorkerGate | None = None, late: int = 0) -> None:
        self.count, self.gate, self.late = count, gate, late

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        began_at = time.perf_counter()
        if self.gate is not None and index == self.late:
            self.gate.pass_through()
        return torch.tensor(time.perf_counter() - began_at, dtype=torch.float64)


class TimedStream(IterableDataset[torch.Tensor]):
    def __init__(self, gate: WorkerGate | None = None) -> None:
        self.gate = gate

    def __iter__(self) -> Any:
        for number in range(24):
            began_at = time.perf_counter()
            if self.gate is not None and number == 0:
                self.gate.pass_through()
            yield torch.tensor(time.perf_counter() - began_at, dtype=torch.float64)


class Trained:
    """The ledger of some epochs, and the program's timings."""

    def __init__(self, loader: Any, epochs: int = 1) -> None:
        self.whole_s = self.computing_s = self.samples_s = 0.0
        for _ in range(epochs):
            began_at = time.perf_counter()
            for batch in loader:
                given_at = time.perf_counter()
                self.samples_s += float(batch.sum())
                self.computing_s += time.perf_counter() - given_at
            self.whole_s += time.perf_counter() - began_at
        self.times: StepTimes = loader.stats().ledger
        self.check()

    def check(self) -> None:
        times = self.times
        assert times.total_s == pytest.approx(sum(getattr(times, name) for name in PARTS))
        assert times.total_s == pytest.approx(times.compute_s + times.loader_s + times.waiting_s)
        assert min(getattr(times, name) for name in PARTS) >= 0
        assert self.computing_s <= times.compute_s
        assert self.computing_s < times.total_s <= self.whole_s


def test_in_process_time_is_dataset_and_collate_time() -> None:
    collating_s = []

    def collate(samples: Any) -> Any:
        began_at = time.perf_counter()
        batch = default_collate(samples)
        collating_s.append(time.perf_counter() - began_at)
        return batch

    done = Trained(DataLoader(Timed(24), batch_size=4, collate_fn=collate))
    times = done.times
    assert times.steps == len(collating_s) == 6
    assert done.samples_s <= times.dataset_s and sum(collating_s) <= times.collate_s
    assert times.worker_s == times.wire_s == times.order_s == 0


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("collate", [None, default_collate])
def test_fast_trainer_waits_for_the_dataset(
    gate: WorkerGate, seeding: str, collate: Callable[[Any], Any] | None
) -> None:
    dataset = Timed(48, gate, late=21)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=collate, seeding=seeding)
    with gate.opened_once_waiting(loader, given=5):
        done = Trained(loader)
    assert done.times.steps == 12
    assert done.times.dataset_s > 0
    stats = loader.stats()
    assert stats.dataset_s >= done.samples_s
    assert stats.collate_s > 0 and stats.prefix_s == 0
    assert stats.dataset_s + stats.collate_s + stats.prefix_s == pytest.approx(stats.fetch_s)


def test_slow_trainer_does_not_wait() -> None:
    loader = DataLoader(Timed(40), batch_size=4, num_workers=2, prefetch_factor=5)
    batches = iter(loader)
    wait_until_ready(loader, 10)
    for _ in range(10):
        next(batches)
    times = loader.stats().ledger
    assert times.steps == 10
    assert times.waiting_s == 0 and times.compute_s > 0


def test_wait_for_overtaken_batch_counts_as_order(
    gate: WorkerGate,
) -> None:
    loader = DataLoader(Timed(32, gate, late=8), batch_size=4, num_workers=2)
    with gate.opened_once_waiting(loader, given=2, ready=1):
        assert Trained(loader).times.order_s > 0
    free = DataLoader(Timed(32, gate, late=8), batch_size=4, num_workers=2, in_order=False)
    # All but the late batch and the next one, for which the same worker has the request.
    with gate.opened_once_waiting(free, given=6):
        assert Trained(free).times.order_s == 0


def test_wait_for_starting_workers_counts_as_worker(gate: WorkerGate) -> None:
    loader = DataLoader(
        Timed(8), batch_size=4, num_workers=1, worker_init_fn=lambda _: gate.pass_through()
    )
    with gate.opened_once_waiting(loader, given=0):
        assert Trained(loader).times.worker_s > 0


def test_wait_for_iterable_dataset_counts_as_dataset(gate: WorkerGate) -> None:
    loader = DataLoader(TimedStream(gate), batch_size=4, num_workers=1)
    with gate.opened_once_waiting(loader, given=0):
        done = Trained(loader)
    assert done.times.dataset_s > 0
    assert loader.stats().dataset_s >= done.samples_s


def test_in_process_iterable_dataset_time_is_counted() -> None:
    done = Trained(DataLoader(TimedStream(), batch_size=4))
    assert done.samples_s <= done.times.dataset_s


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Counted(Dataset[int]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.long
def test_pool_controller_has_the_step_time_breakdown(
    pool: PoolProcesses,
) -> None:
    pool.start_worker()
    loader = DataLoader(Counted(), batch_size=4, pool=pool.endpoint)
    batches = iter(loader)
    for _ in range(50):
        next(batches)
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        told = [one["ledger"] for one in pool.status()["trainers"]]
        if told and told[0]["steps"] == 50:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    times = loader.stats().ledger
    assert set(told[0]) == {"steps", *PARTS}
    # In whole microseconds at most, and without the time of iter().
    assert 0 < told[0].pop("loader_s") <= times.loader_s
    for name, seconds in told[0].items():
        assert seconds == pytest.approx(getattr(times, name), abs=1e-6), name
    assert times.worker_s + times.dataset_s + times.wire_s > 0


def test_times_are_split_by_worker() -> None:
    loader = DataLoader(Timed(32), batch_size=4, num_workers=2)
    list(loader)
    stats = loader.stats()
    assert sorted(stats.workers) == [0, 1]
    assert [worker.batches for worker in stats.workers.values()] == [4, 4]
    for name in ("dataset_s", "collate_s", "wire_s"):
        of_workers = sum(getattr(worker, name) for worker in stats.workers.values())
        assert of_workers == pytest.approx(getattr(stats, name))


@pytest.mark.parametrize("collate", [None, default_collate])
def test_slow_sample_has_its_index(gate: WorkerGate, collate: Callable[[Any], Any] | None) -> None:
    # None of eight samples is left out for slower ones.
    loader = DataLoader(Timed(8, gate, late=5), batch_size=4, num_workers=1, collate_fn=collate)
    with gate.opened_once_waiting(loader, given=1):
        samples = torch.cat(list(loader))
    slow = loader.stats().slow_samples
    assert [one.seconds for one in slow] == sorted((one.seconds for one in slow), reverse=True)
    [late] = [one for one in slow if one.index == 5]
    assert (late.batch, late.place, late.worker) == (1, 1, 0)
    assert late.seconds >= float(samples[5])


def test_in_process_slow_sample_has_its_index() -> None:
    sample_s = []

    class Long(Timed):
        def __getitem__(self, index: int) -> torch.Tensor:
            began_at = time.perf_counter()
            sample = torch.ones(200_000).cumsum(0)[-1]  # far above the 20 µs of a timed sample
            sample_s.append(time.perf_counter() - began_at)
            return sample

    loader = DataLoader(Long(8), batch_size=4)
    list(loader)
    slow = loader.stats().slow_samples
    found = {one.index: one.seconds for one in slow if one.index is not None}
    assert found and all(seconds >= sample_s[index] for index, seconds in found.items())


def test_slow_samples_are_formatted_as_sentences() -> None:
    assert str(SlowSample(0.4, 9, 2, 1, 0)) == "sample 9 took 400 ms"
    assert str(SlowSample(0.4, None, 2, 1, 0)) == "sample 1 of batch 2 took 400 ms"
    assert str(SlowSample(0.4, None, 2, None, 0)) == "the samples of batch 2 took 400 ms"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_not_timed_one_by_one_are_listed_by_batch(num_workers: int) -> None:
    loader = DataLoader(TimedStream(), batch_size=4, num_workers=num_workers)
    batches = list(loader)
    slow = {one.batch: one for one in loader.stats().slow_samples}
    for number, batch in enumerate(batches):
        assert slow[number].index is None and slow[number].place is None
        assert slow[number].seconds >= float(batch.sum())


def test_step_times_accumulate_and_can_be_subtracted() -> None:
    loader = DataLoader(Timed(16), batch_size=4, num_workers=1)
    first = Trained(loader).times
    list(loader)
    both = loader.stats().ledger
    assert both.steps == 8
    window = both - first
    assert window.steps == 4
    assert window.total_s == pytest.approx(both.total_s - first.total_s)
    assert "computing" in str(window) and "(" in str(window)


def test_step_times_before_any_step_say_none_counted() -> None:
    assert str(DataLoader(Timed(4)).stats().ledger) == "no steps have been counted"
