# SPDX-License-Identifier: Apache-2.0
"""seeding="batch": the stream depends on the place of a batch, not on the worker that makes it."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stream_oracle import describe, error_of
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.errors import UnsupportedError


def draws() -> list[float]:
    """One number from each of the global generators."""
    return [float(torch.rand(())), random.random(), float(np.random.random())]


class Augmented(Dataset[Any]):
    """Random samples; some fail."""

    def __init__(self, count: int = 23, failing: int = -1) -> None:
        self.count = count
        self.failing = failing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.failing:
            raise LookupError(f"sample {index} after {draws()}")
        return {"index": index, "noise": torch.rand(3), "numbers": draws()}


class Shard(IterableDataset[Any]):
    """Counts upwards in steps of the number of shards; shards differ in length and draw numbers.

    It counts its epochs in an attribute, so that a copy shared by two shards would be noticed.
    """

    def __init__(self, count: int = 40) -> None:
        self.count = count
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        seen_by_dataset = -1 if info is None else info.dataset.epoch
        self.epoch += 1
        shift = draws()
        for index in range(first, self.count - 5 * first, step):
            yield [index, self.epoch, seen_by_dataset, shift, draws()]


def jittered(samples: list[Any]) -> Any:
    return [default_collate(samples), draws()]


def generator_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]


def epochs(loader: Any, count: int = 3) -> list[Any]:
    """The stream of a few epochs, and the state of the trainer's generators after each."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    seen = []
    for _ in range(count):
        iterator = iter(loader)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except LookupError as error:
                seen.append(str(error).splitlines()[-1].removeprefix("LookupError: "))
                continue
            seen.append(describe(batch))
        seen.append(describe(generator_states()))
    return seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 5, "collate_fn": jittered, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "shuffle": True, "generator": 5},
    ],
    ids=["shuffled", "random collate", "single samples", "own generator"],
)
def test_map_stream_is_independent_of_worker_count(
    options: dict[str, Any],
) -> None:
    def stream(**others: Any) -> list[Any]:
        own = dict(options)
        if "generator" in own:
            own["generator"] = torch.Generator().manual_seed(own["generator"])
        return epochs(DataLoader(Augmented(), seeding="batch", **own, **others))

    expected = stream()
    if "generator" not in options:  # from which the trainer's generator would not move
        assert len(set(map(repr, expected))) == len(expected)  # no two batches drew the same
    for workers in (1, 2, 3):
        assert stream(num_workers=workers) == expected
    assert stream(num_workers=2, persistent_workers=True, prefetch_factor=4) == expected


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_give_the_same_stream(method: str) -> None:
    expected = epochs(DataLoader(Augmented(), batch_size=4, seeding="batch"), 1)
    loader = DataLoader(
        Augmented(), batch_size=4, seeding="batch", num_workers=2, multiprocessing_context=method
    )
    assert epochs(loader, 1) == expected


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "options",
    [{"batch_size": 3}, {"batch_size": 2, "drop_last": True, "collate_fn": jittered}],
    ids=["plain", "random collate"],
)
def test_iterable_stream_depends_only_on_shards(shards: int, options: dict[str, Any]) -> None:
    def stream(**others: Any) -> list[Any]:
        return epochs(DataLoader(Shard(), seeding="batch", shards=shards, **options, **others), 2)

    expected = stream(num_workers=1, persistent_workers=True)
    for workers in (2, 3, 4, 6):
        assert stream(num_workers=workers, persistent_workers=True) == expected
    fresh = stream(num_workers=1)  # workers with a separate epoch see a dataset of epoch 0
    for workers in (2, 3):
        assert stream(num_workers=workers) == fresh


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_alternate_without_workers_as_with_workers(shards: int) -> None:
    class Counting(Shard):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            for index in range(first, 30 - 5 * first, step):
                yield [index, draws()]

    expected = epochs(
        DataLoader(Counting(), batch_size=2, seeding="batch", shards=shards, num_workers=2)
    )
    assert epochs(DataLoader(Counting(), batch_size=2, seeding="batch", shards=shards)) == expected
    assert get_worker_info() is None


def test_default_shard_count_is_num_workers() -> None:
    expected = epochs(DataLoader(Shard(), seeding="batch", num_workers=3), 1)
    assert epochs(DataLoader(Shard(), seeding="batch", num_workers=2, shards=3), 1) == expected


def test_error_is_raised_at_its_batch_and_shifts_no_seed() -> None:
    expected = epochs(DataLoader(Augmented(failing=9), batch_size=4, seeding="batch"), 1)
    assert sum("sample 9" in str(seen) for seen in expected) == 1
    for workers in (1, 2):
        loader = DataLoader(
            Augmented(failing=9), batch_size=4, seeding="batch", num_workers=workers
        )
        assert epochs(loader, 1) == expected


def refuse_second_worker(worker_id: int) -> None:
    if worker_id == 1:
        raise LookupError("no worker 1 today")


def error_or_none(iterator: Iterator[Any]) -> Exception | None:
    try:
        next(iterator)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("dataset", [Augmented(12), Shard(24)], ids=["map", "iterable"])
@pytest.mark.parametrize("keeps", [False, True])
def test_worker_that_failed_to_initialise_gives_only_errors(dataset: Any, keeps: bool) -> None:
    """There was one error, followed by batches of a worker that had not been initialised."""
    loader = DataLoader(
        dataset,
        batch_size=2,
        seeding="batch",
        num_workers=2,
        worker_init_fn=refuse_second_worker,
        persistent_workers=keeps,
    )
    for _ in range(2):
        iterator = iter(loader)
        outcomes = [error_or_none(iterator) for _ in range(6)]
        assert [type(outcome) for outcome in outcomes] == [type(None), LookupError] * 3
        for error in outcomes[1::2]:
            assert str(error).startswith("Caught LookupError in DataLoader worker process 1.")
            assert "no worker 1 today" in str(error)


def test_in_order_false_changes_no_batch() -> None:
    ordered = [describe(batch) for batch in seeded(num_workers=2)]
    free = [describe(batch) for batch in seeded(num_workers=2, in_order=False)]
    assert sorted(map(repr, free)) == sorted(map(repr, ordered))


def seeded(**options: Any) -> Any:
    torch.manual_seed(3)
    return iter(DataLoader(Augmented(), batch_size=2, seeding="batch", **options))


def test_stream_depends_on_base_seed_and_epoch() -> None:
    loader = DataLoader(Augmented(4), seeding="batch")
    torch.manual_seed(1)
    first = [describe(batch) for batch in loader]
    torch.manual_seed(1)
    assert [describe(batch) for batch in loader] != first, "another epoch"
    torch.manual_seed(2)
    other = DataLoader(Augmented(4), seeding="batch")
    assert [describe(batch) for batch in other] != first, "another base seed"
    torch.manual_seed(1)
    again = DataLoader(Augmented(4), seeding="batch")
    assert [describe(batch) for batch in again] == first


def test_default_seeding_is_worker_and_matches_torch() -> None:
    streams = []
    for options in ({}, {"seeding": None}, {"seeding": "worker"}):
        torch.manual_seed(4)
        streams.append(
            [describe(batch) for batch in DataLoader(Augmented(), num_workers=2, **options)]  # type: ignore[arg-type]
        )
    torch.manual_seed(4)
    torchs = torch.utils.data.DataLoader(Augmented(), num_workers=2)
    assert streams == [[describe(batch) for batch in torchs]] * 3


def test_uncopyable_dataset_raises_at_batches_of_its_shard() -> None:
    class Locked(Shard):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    for workers in (0, 1):
        iterator = iter(
            DataLoader(Locked(), seeding="batch", shards=2, num_workers=workers, batch_size=None)
        )
        assert next(iterator)[0] == 0
        error = error_of(lambda iterator=iterator: next(iterator))
        assert type(error) is UnsupportedError
        assert "shard 1 needs its own copy of the Locked" in str(error)
        assert "as many workers as shards" in str(error)
    whole = DataLoader(Locked(), seeding="batch", shards=2, num_workers=2, batch_size=None)
    assert len(list(whole)) == 20 + 17


@pytest.mark.parametrize(
    ("dataset", "options", "kind", "words"),
    [
        (Augmented(), {"seeding": "x"}, ValueError, "any batch size), got 'x'"),
        (Augmented(), {"seeding": True}, ValueError, "any batch size), got True"),
        (Augmented(), {"shards": 2, "seeding": "batch"}, ValueError, "is read by index"),
        (Shard(), {"shards": 2}, ValueError, "shards=2 requires seeding='batch'"),
        (Shard(), {"shards": 0, "seeding": "batch"}, ValueError, "shards must be >= 1, got 0"),
        (Shard(), {"shards": 2.0, "seeding": "batch"}, TypeError, "an int >= 1 or None, got 2.0"),
        (Shard(), {"shards": True, "seeding": "batch"}, TypeError, "an int >= 1 or None, got True"),
    ],
)
def test_invalid_seeding_options_are_rejected(
    dataset: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    error = error_of(lambda: DataLoader(dataset, **options))
    assert type(error) is kind
    assert words in str(error)
    loader = DataLoader(dataset)
    for name, value in options.items():
        setattr(loader, name, value)
    error = error_of(lambda: iter(loader))
    assert type(error) is kind
    assert words in str(error)


def test_changing_seeding_restarts_persistent_workers() -> None:
    torch.manual_seed(6)
    loader = DataLoader(Augmented(), num_workers=1, persistent_workers=True)
    workers = iter(loader)._workers  # type: ignore[attr-defined]
    loader.seeding = "batch"
    torch.manual_seed(6)
    changed = [describe(batch) for batch in loader]
    torch.manual_seed(6)
    assert changed == [describe(batch) for batch in DataLoader(Augmented(), seeding="batch")]
    assert not any(worker.is_alive() for worker in workers)


def test_datapipes_cannot_be_seeded_by_batch() -> None:
    with pytest.raises(ValueError, match="seeding must be None for a datapipe, .*, got 'batch'"):
        DataLoader(IterableWrapper([1, 2]), seeding="batch")


def test_seeding_options_are_loader_attributes() -> None:
    loader = DataLoader(Shard(), seeding="batch", shards=3)
    assert (vars(loader)["seeding"], vars(loader)["shards"]) == ("batch", 3)


class PerSample(Dataset[Any]):
    """Draws from the generator that it is given, and never from a global one."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> Any:
        return index, float(torch.rand((), generator=generator))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_subset", [False, True])
def test_stream_with_sample_generator_is_thread_independent(workers: int, is_subset: bool) -> None:
    dataset: Any = PerSample()
    if is_subset:
        dataset = torch.utils.data.Subset(torch.utils.data.Subset(dataset, range(3, 17)), [5, 1, 9])

    def stream(**options: Any) -> list[Any]:
        return epochs(
            DataLoader(
                dataset,
                batch_size=4,
                shuffle=True,
                seeding="batch",
                collate_fn=jittered,
                num_workers=workers,
                **options,
            )
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global random generators")
        expected = stream()
        assert stream(fetch_threads=3) == expected
        assert stream(fetch_threads=16) == expected
    draws_seen = [str(batch) for batch in expected]
    assert len(set(draws_seen)) == len(draws_seen)


def test_each_sample_has_its_own_generator_without_batching() -> None:
    def stream(workers: int) -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(PerSample(), batch_size=None, seeding="batch", num_workers=workers)
        return [describe(batch) for batch in loader]

    assert stream(0) == stream(2)
    assert len(set(map(repr, stream(0)))) == 17


def test_worker_seeding_passes_no_generator() -> None:
    class Strict(PerSample):
        def __getitem__(self, index: int, generator: torch.Generator | None = None) -> Any:
            assert generator is None
            return index

    for workers in (0, 1):
        assert len(list(DataLoader(Strict(), num_workers=workers))) == 17


@pytest.mark.parametrize("workers", [0, 2])
def test_global_draws_on_fetch_threads_warn_once(
    workers: int,
) -> None:
    loader = DataLoader(
        Augmented(),
        batch_size=4,
        seeding="batch",
        fetch_threads=3,
        num_workers=workers,
        collate_fn=jittered,
    )
    torch.manual_seed(8)
    with pytest.warns(UserWarning, match="fetched on 3 threads, so seeding='batch' cannot") as seen:
        collated = [batch[1] for _ in range(2) for batch in loader]
    assert sum("global random generators" in str(warning.message) for warning in seen) == 1
    assert loader.stats().unrepeatable_batches == (0 if workers == 0 else 12)
    torch.manual_seed(8)
    serial = DataLoader(PerSampleCount(), batch_size=4, seeding="batch", collate_fn=jittered)
    assert collated == [batch[1] for _ in range(2) for batch in serial]


class PerSampleCount(PerSample):
    """As long as Augmented, drawing no number that could affect collate_fn."""

    def __len__(self) -> int:
        return 23


def test_no_warning_without_global_draws_on_fetch_threads() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global random generators")
        list(DataLoader(PerSample(), seeding="batch", fetch_threads=2, num_workers=1))
