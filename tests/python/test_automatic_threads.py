# SPDX-License-Identifier: Apache-2.0
"""fetch_threads="auto": the batches of one thread, fetched on more where samples wait."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from forced_threads import four_threads  # noqa: F401 - a fixture
from sample_datasets import Computed, Streamed, as_is
from stream_oracle import describe, error_of
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.tuning.thread_choice import ThreadChoice
from penstock.worker import automatic_threads
from penstock.worker.reachable import generators_in

SAMPLES = 160
BATCH = 8
WAIT_S = 0.001
DRAWS: dict[str, Any] = {
    "torch": lambda: torch.rand(()),
    "random": lambda: torch.tensor(random.random()),
    "numpy": lambda: torch.tensor(np.random.random()),
}


class Waiting(Dataset[Any]):
    """Samples that wait as for storage. From ``draws_from`` on they draw random numbers."""

    def __init__(self, draw: str = "torch", draws_from: int = SAMPLES) -> None:
        self.draw, self.draws_from = draw, draws_from
        self.threads: set[str] = set()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"draw": self.draw, "draws_from": self.draws_from}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            self.threads.add(threading.current_thread().name)
        time.sleep(WAIT_S)
        drawn = DRAWS[self.draw]() if index >= self.draws_from else torch.zeros(())
        return {"index": index, "drawn": drawn}


class RarelyDrawing(Waiting):
    """Few samples draw, and some wait long, so that other threads go on with later batches."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01 if index % 16 == 3 else 0.0)
        sample = super().__getitem__(index)
        if index % 37 == 5:
            sample["drawn"] = DRAWS[self.draw]()
        return sample


class Seeded(Waiting):
    """The same, which takes a generator."""

    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> Any:
        sample = super().__getitem__(index)
        sample["drawn"] = torch.rand((), generator=generator)
        return sample


class WithGenerator(Waiting):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample["drawn"] = torch.rand((), generator=self.generator)
        return sample


def used_threads(dataset: Waiting) -> bool:
    return any(name.startswith("pk_fetch") for name in dataset.threads)


def stream_of(make: Any, dataset: Any, **options: Any) -> list[Any]:
    """All batches of two epochs, and the global generators after each."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loader = make(dataset, batch_size=BATCH, shuffle=True, **options)
    seen: list[Any] = []
    for _ in range(2):
        seen += [describe(batch) for batch in loader]
        seen.append(describe([torch.get_rng_state(), random.random(), np.random.random()]))
    return seen


AUTOMATIC = functools.partial(DataLoader, fetch_threads="auto")


def test_samples_that_wait_are_fetched_on_threads_in_torchs_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automatic_threads, "_not_waiting_s", lambda: 0.0)
    dataset = Waiting()
    assert stream_of(AUTOMATIC, dataset) == stream_of(torch.utils.data.DataLoader, Waiting())
    assert used_threads(dataset)


@pytest.mark.slow
@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("collate_fn", [None, as_is], ids=["default", "own"])
def test_draws_of_samples_fetched_ahead_are_those_of_torch(draw: str, collate_fn: Any) -> None:
    options = {"num_workers": 2, "prefetch_factor": 4, "collate_fn": collate_fn}
    expected = stream_of(torch.utils.data.DataLoader, RarelyDrawing(draw), **options)
    for _ in range(3):
        assert stream_of(AUTOMATIC, RarelyDrawing(draw), **options) == expected


def test_sleep_is_not_time_of_the_thread() -> None:
    began_at, before_s = time.perf_counter(), automatic_threads._not_waiting_s()
    time.sleep(0.1)
    assert automatic_threads._not_waiting_s() - before_s < time.perf_counter() - began_at


def test_samples_that_compute_are_fetched_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_threads, "_not_waiting_s", time.perf_counter)
    names = set()

    def square(index: int) -> int:
        names.add(threading.current_thread().name)
        return index * index

    for batch in AUTOMATIC(Computed(SAMPLES, square), batch_size=BATCH):
        assert len(batch) == BATCH
    assert names == {threading.main_thread().name}


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("draws_from", [0, SAMPLES - 4])
def test_draws_are_those_of_torch(draw: str, draws_from: int) -> None:
    ours, torchs = Waiting(draw, draws_from), Waiting(draw, draws_from)
    with pytest.warns(UserWarning, match="draw from the global random generators"):
        seen = stream_of(AUTOMATIC, ours)
    assert seen == stream_of(torch.utils.data.DataLoader, torchs)


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("draws_from", [0, SAMPLES // 2, SAMPLES])
@pytest.mark.parametrize("seeding", [None, "batch", "sample"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_is_the_one_of_one_thread(
    num_workers: int, seeding: str | None, draws_from: int
) -> None:
    options = {"num_workers": num_workers, "seeding": seeding}
    with (
        pytest.warns(UserWarning)
        if num_workers == 0 and draws_from < SAMPLES
        else contextlib.nullcontext()
    ):
        seen = stream_of(AUTOMATIC, Waiting(draws_from=draws_from), **options)
    assert seen == stream_of(DataLoader, Waiting(draws_from=draws_from), **options)


@pytest.mark.slow
@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_generators_of_samples_allow_threads(seeding: str) -> None:
    dataset = Seeded()
    seen = stream_of(AUTOMATIC, dataset, seeding=seeding)
    assert seen == stream_of(DataLoader, Seeded(), seeding=seeding)
    assert used_threads(dataset)


@pytest.mark.usefixtures("four_threads")
def test_dataset_with_its_own_generator_has_one_thread() -> None:
    dataset = WithGenerator()
    with pytest.warns(UserWarning, match="random generator in an attribute"):
        seen = stream_of(AUTOMATIC, dataset)
    assert seen == stream_of(torch.utils.data.DataLoader, WithGenerator())
    assert not used_threads(dataset)


def test_search_finds_generators_in_containers_and_ends() -> None:
    dataset = Waiting()
    dataset.parts = [{"a": (np.random.default_rng(1),)}, dataset]  # type: ignore[attr-defined]
    assert [type(one) for one in generators_in(dataset)] == [np.random.Generator]


class Failing(Waiting):
    def __getitem__(self, index: int) -> Any:
        if index in (SAMPLES - 3, SAMPLES - 6):
            raise KeyError(f"no object {index}")
        return super().__getitem__(index)


@pytest.mark.usefixtures("four_threads")
def test_error_is_that_of_the_first_failing_sample() -> None:
    def to_end(make: Any) -> Any:
        return error_of(lambda: list(make(Failing(), batch_size=BATCH)))

    ours, torchs = to_end(AUTOMATIC), to_end(torch.utils.data.DataLoader)
    assert type(ours) is type(torchs)
    assert str(ours) == str(torchs) == repr(f"no object {SAMPLES - 6}")


@pytest.mark.usefixtures("four_threads")
def test_failing_samples_are_left_out() -> None:
    dataset = Failing()
    loader = AUTOMATIC(dataset, batch_size=BATCH, on_error="skip")
    indices = torch.cat([batch["index"] for batch in loader])
    assert indices.tolist() == [one for one in range(SAMPLES) if one not in (154, 157)]
    assert sorted(int(one.index) for one in loader.skipped) == [154, 157]
    assert used_threads(dataset)


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match=r"an int >= 1 or 'auto', got 'many'"):
        DataLoader(Waiting(), fetch_threads="many")
    with pytest.raises(ValueError, match=r"fetch_threads='auto' requires a map-style dataset"):
        AUTOMATIC(Streamed(4))
    with pytest.raises(ValueError, match=r"fetch_threads='auto' requires batches of samples"):
        AUTOMATIC(Waiting(), batch_size=None)


def feed(choice: ThreadChoice, count: int, sample_s: Any, waiting: float) -> list[int]:
    """Report batches of 64, for which ``sample_s`` gives the time of a sample on so many threads;
    return the numbers of threads."""
    counts = []
    for _ in range(count):
        counts.append(choice.threads)
        if choice.is_measured():
            spent_s = 64 * sample_s(choice.threads)
            choice.note(64, spent_s, spent_s, waiting * spent_s)
    return counts


def test_choice_grows_while_samples_come_faster() -> None:
    choice = ThreadChoice(32)
    counts = feed(choice, 40, lambda threads: 0.01 / min(threads, 12), 0.9)
    assert counts[:4] == [1, 1, 1, 10]  # one that starts up, two of 0.64 s that are measured
    assert sorted(set(counts)) == [1, 10, 20, 32]
    assert choice.threads == 20


@pytest.mark.parametrize(("batch_s", "measured_count"), [(0.1, 3), (0.4, 3), (0.6, 2), (6.5, 1)])
def test_choice_measures_fewer_batches_if_they_are_slow(
    batch_s: float, measured_count: int
) -> None:
    counts = feed(ThreadChoice(32), 8, lambda threads: batch_s / 64 / threads, 0.9)
    assert counts.index(10) == 1 + measured_count


def test_choice_stays_at_one_thread_for_samples_that_compute_or_are_fast() -> None:
    for sample_s, waiting in ((0.01, 0.2), (1e-6, 0.9)):
        choice = ThreadChoice(32)
        assert set(feed(choice, 500, lambda threads, s=sample_s: s, waiting)) == {1}


def test_choice_returns_to_one_thread_if_more_do_not_help() -> None:
    choice = ThreadChoice(32)
    counts = feed(choice, 600, lambda threads: 0.01, 0.9)
    assert counts[-1] == 1
    assert counts.count(10) <= 8  # of a second attempt, much later


def test_choice_keeps_threads_for_samples_of_which_few_wait() -> None:
    """Threads make most batches ahead; one in eight waits for a slow sample."""
    choice = ThreadChoice(32)
    for index in range(200):
        if choice.is_measured():
            is_slow = choice.threads == 1 or index % 8 == 0
            spent_s = 0.08 if is_slow else 0.0
            choice.note(32, spent_s, max(spent_s, 0.01), 0.9 * max(spent_s, 0.01))
    assert choice.threads >= 10


def test_choice_follows_a_page_cache_that_becomes_warm() -> None:
    choice = ThreadChoice(32)
    feed(choice, 40, lambda threads: 0.01 / threads, 0.9)
    assert choice.threads == 32
    feed(choice, 120, lambda threads: 0.0001, 0.05)
    assert choice.threads == 1
    feed(choice, 500, lambda threads: 0.01 / threads, 0.9)
    assert choice.threads == 32


def test_forbidden_choice_measures_no_more() -> None:
    choice = ThreadChoice(32)
    feed(choice, 40, lambda threads: 0.01 / threads, 0.9)
    choice.forbid()
    assert feed(choice, 100, lambda threads: 0.01 / threads, 0.9) == [1] * 100
    assert not choice.is_measured()
