# SPDX-License-Identifier: Apache-2.0
"""state_dict() and load_state_dict(): the rest of the stream is that of the uninterrupted run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stream_oracle import describe, error_of
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.errors import UnsupportedError

COUNT = 23


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.random())]


def jittered(samples: list[Any]) -> Any:
    return [default_collate(samples), draws()]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Counted(Dataset[Any]):
    """Samples that say which they are; one may fail."""

    def __init__(self, count: int = COUNT, failing: int = -1) -> None:
        self.count = count
        self.failing = failing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.failing:
            raise LookupError(f"sample {index}")
        return index


class Augmented(Counted):
    def __getitem__(self, index: int) -> Any:
        return [super().__getitem__(index), draws()]


class Shards(IterableDataset[Any]):
    """Shards of different lengths whose samples are random."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        shift = draws()
        for index in range(first, 40 - 9 * first, step):
            yield [index, shift, draws()]


class Remembering(IterableDataset[Any]):
    """Keeps its place on itself."""

    def __init__(self) -> None:
        self.place = 0
        self.was_loaded = False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if not self.was_loaded:
            self.place = 0 if info is None else info.id
        self.was_loaded = False
        while self.place < 31:
            self.place += 1 if info is None else info.num_workers
            yield self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.was_loaded = True


class Cursor(Iterator[int]):
    """An iterator with a state, which says whether it was read up to its place or put there."""

    def __init__(self, place: int, step: int) -> None:
        self.place, self.step = place, step

    def __next__(self) -> int:
        if self.place >= 31:
            raise StopIteration
        self.place += self.step
        return self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.place < self.step, "it was read before it was put in its place"
        self.place = state["place"]


class WithCursor(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return Cursor(0, 1) if info is None else Cursor(info.id, info.num_workers)


class Faulty(Cursor):
    """Fails now and then, and goes on."""

    def __next__(self) -> Any:
        if super().__next__() % 7 == 0:
            raise LookupError(f"at {self.place}")
        return Wrapped(self.place, draws())


class WithFaults(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        cursor = Faulty(0, 1) if info is None else Faulty(info.id, info.num_workers)
        return cursor if self.is_stateful else map(as_is, cursor)

    def __init__(self, is_stateful: bool) -> None:
        self.is_stateful = is_stateful


class Wrapped:
    """What has to be pickled."""

    def __init__(self, place: int, numbers: list[float]) -> None:
        self.place, self.numbers = place, numbers


def as_is(batch: Any) -> Any:
    return batch


class Counting(Dataset[Any]):
    """A map-style dataset that counts what it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return [index, self.asked]

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return COUNT


class StatefulSampler(Sampler[int]):
    """Keeps its place, like torchdata's StatefulDistributedSampler."""

    def __init__(self) -> None:
        self.yielded = 0
        self.next_yielded = 0
        self.pulls = 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.next_yielded = self.next_yielded, 0
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(4)).tolist()
        for index in order[self.yielded :]:
            self.yielded += 1
            self.pulls += 1
            yield index

    def __len__(self) -> int:
        return COUNT

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_yielded = state["yielded"]


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Up to ``count`` batches and errors, described."""
    seen: list[Any] = []
    for _ in range(count):
        try:
            seen.append(describe(next(iterator)))
        except StopIteration:
            break
        except LookupError as error:
            seen.append(str(error).splitlines()[-1].removeprefix("LookupError: "))
    return seen


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def whole(make: Callable[[], Any]) -> list[Any]:
    """The stream of one epoch, uninterrupted."""
    seed_all(7)
    return take(iter(make()), 99)


def state_after(make: Callable[[], Any], count: int) -> dict[str, Any]:
    """The state of a loader that gave ``count`` batches, as it went through JSON."""
    seed_all(7)
    loader = make()
    iterator = iter(loader)
    take(iterator, count)
    return through_json(loader.state_dict())


def rest_of(make: Callable[[], Any], state: dict[str, Any], count: int = 99) -> list[Any]:
    """What a fresh loader gives after ``state``, in a process whose generators are elsewhere."""
    seed_all(1234)
    loader = make()
    loader.load_state_dict(state)
    before = describe([torch.get_rng_state(), random.getstate(), np.random.get_state()])
    iterator = iter(loader)
    after = describe([torch.get_rng_state(), random.getstate(), np.random.get_state()])
    assert after == before, "the trainer's own random numbers are its own"
    return take(iterator, count)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "single samples": lambda: {"batch_size": None, "sampler": RandomSampler(range(COUNT))},
    "own generator": lambda: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(5),
    },
    "Python sampler": lambda: {"batch_size": 4, "sampler": Backwards()},
    "SubsetRandomSampler": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(COUNT))},
    "WeightedRandomSampler": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0 + i for i in range(COUNT)], COUNT),
    },
    "own batch_sampler": lambda: {
        "batch_sampler": BatchSampler(
            RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(6)), 4, False
        )
    },
    "replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(COUNT), replacement=True, num_samples=40),
    },
    "stateful sampler": lambda: {"batch_size": 4, "sampler": StatefulSampler()},
}


@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (0, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_a_map_dataset_is_resumed_where_it_was(
    options: Callable[[], dict[str, Any]], workers: tuple[int, int]
) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(Counted(), num_workers=num_workers, **options())

    expected = whole(make(workers[0]))
    for count in (0, 3, len(expected)):
        state = state_after(make(workers[0]), count)
        assert state["_num_yielded"] == state["_sampler_iter_yielded"] == count
        assert state["_iterator_finished"] is False
        assert rest_of(make(workers[1]), state) == expected[count:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 5, "collate_fn": jittered, "sampler": Backwards()},
        {"batch_size": None},
    ],
    ids=["shuffled", "random collate", "single samples"],
)
def test_seeded_batches_are_resumed_to_the_bit_by_any_number_of_workers(
    options: dict[str, Any],
) -> None:
    def make(num_workers: int) -> Any:
        dataset = Augmented(failing=9)
        return lambda: DataLoader(dataset, seeding="batch", num_workers=num_workers, **options)

    expected = whole(make(0))
    assert sum("sample 9" in str(seen) for seen in expected) == 1
    for before, after, count in [(0, 3, 1), (3, 0, 2), (1, 2, 4), (2, 3, 3), (2, 0, 0)]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_of_an_iterable_dataset_are_resumed_by_any_number_of_workers(shards: int) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(
            Shards(),
            batch_size=3,
            seeding="batch",
            shards=shards,
            num_workers=num_workers,
            collate_fn=jittered,
        )

    expected = whole(make(0))
    for before, after, count in [(0, 2, 1), (2, 0, 5), (1, 3, 8), (3, 1, len(expected))]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Shards, Remembering, WithCursor])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, None])
def test_an_iterable_dataset_is_resumed_with_torchs_seeds(
    dataset: type, workers: int, batch_size: int | None
) -> None:
    def make() -> Any:
        return DataLoader(dataset(), batch_size=batch_size, num_workers=workers)

    expected = whole(make)
    for count in (0, 4, len(expected) - 1, len(expected)):
        state = state_after(make, count)
        rest = rest_of(make, state)
        if workers == 0 and dataset is Shards:  # draws from the trainer's generators
            rest, tail = [one[1][0] for one in rest], [one[1][0] for one in expected[count:]]
            assert rest == tail
        else:
            assert rest == expected[count:]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_place_can_be_resumed_again_and_again(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Augmented(), 4, shuffle=True, seeding="batch", num_workers=workers)

    expected = whole(make)
    state = state_after(make, 1)
    for count in range(1, len(expected)):
        seed_all(count)
        loader = make()
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state, "nothing was taken yet"
        assert take(iter(loader), 1) == [expected[count]]
        state = through_json(loader.state_dict())
    assert rest_of(make, state) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_later_epoch_is_resumed_and_the_next_follows(
    workers: int, persistent: bool, seeding: Any
) -> None:
    dataset = Augmented() if seeding == "batch" else Counted()

    def make() -> Any:
        return DataLoader(
            dataset,
            4,
            shuffle=True,
            seeding=seeding,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            generator=torch.Generator().manual_seed(8),
        )

    loader = make()
    expected = [take(iter(loader), 99) for _ in range(3)]
    loader = make()
    take(iter(loader), 99)
    take(iter(loader), 2)
    state = through_json(loader.state_dict())
    loader = make()
    loader.load_state_dict(state)
    assert take(iter(loader), 99) == expected[1][2:]
    assert take(iter(loader), 99) == expected[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_shuffle_of_a_later_epoch_of_persistent_workers_is_drawn_again(
    workers: int, persistent: bool
) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, shuffle=True, num_workers=2, persistent_workers=persistent)

    seed_all(7)
    loader = make()
    take(iter(loader), 99)
    second = take(iter(loader), 99)
    seed_all(7)
    loader = make()
    take(iter(loader), 99)
    between = through_json(loader.state_dict())
    take(iter(loader), 2)
    state = through_json(loader.state_dict())
    after = lambda: DataLoader(Counted(), 4, shuffle=True, num_workers=workers)  # noqa: E731
    assert rest_of(after, between) == second
    assert rest_of(after, state) == second[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_between_epochs_begins_the_next_one(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Augmented(), 4, shuffle=True, seeding="batch", num_workers=workers)

    seed_all(7)
    loader = make()
    expected = [take(iter(loader), 99) for _ in range(2)]
    seed_all(7)
    loader = make()
    before = through_json(loader.state_dict())
    assert before["_num_yielded"] == 0
    assert not before["_iterator_finished"]
    assert take(iter(loader), 99) == expected[0], "asking for the state changes nothing"
    after = through_json(loader.state_dict())
    assert after["_iterator_finished"]
    assert after["_num_yielded"] == len(expected[0])
    assert take(iter(loader), 99) == expected[1]
    assert rest_of(make, before) == expected[0]
    assert rest_of(make, after) == expected[1]


def test_a_state_of_now_moves_the_generators_as_iter_does() -> None:
    def drive(load: bool) -> Any:
        seed_all(3)
        loader = DataLoader(Counted(), 4, shuffle=True)
        if load:
            loader.load_state_dict(through_json(loader.state_dict()))
        seen = [take(iter(loader), 99) for _ in range(2)]
        return seen, describe(torch.get_rng_state())

    assert drive(True) == drive(False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_with_a_state_is_not_pulled_again(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, sampler=StatefulSampler(), num_workers=workers)

    expected = whole(make)
    state = state_after(make, 3)
    assert state["_index_sampler_state"] == {"samples_yielded": 12, "sampler": {"yielded": 12}}
    loader = make()
    loader.load_state_dict(state)
    assert take(iter(loader), 99) == expected[3:]
    assert loader.sampler.pulls == COUNT - 12


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_map_dataset_with_a_state_gets_it_back(workers: int, seeding: Any) -> None:
    def make() -> Any:
        return DataLoader(Counting(), batch_size=4, num_workers=workers, seeding=seeding)

    expected = whole(make)
    state = state_after(make, 3)
    assert rest_of(make, state) == expected[3:]
    error = error_of(
        lambda: DataLoader(
            Counting(), batch_size=4, num_workers=3, seeding=seeding
        ).load_state_dict(state)
    )
    assert type(error) is ValueError
    assert f"resume with num_workers={max(workers, 1)}" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dataset", [Remembering, WithCursor])
def test_stateful_shards_change_hands(dataset: type, shards: int) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(
            dataset(), batch_size=3, seeding="batch", shards=shards, num_workers=num_workers
        )

    expected = whole(make(0))
    for before, after, count in [(0, 2, 4), (2, 0, 5), (1, 3, 2)]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


@pytest.mark.slow
@pytest.mark.parametrize("is_stateful", [False, True])
def test_batches_that_raised_keep_their_places(is_stateful: bool) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(
            WithFaults(is_stateful),
            batch_size=2,
            seeding="batch",
            shards=2,
            num_workers=num_workers,
            collate_fn=as_is,
        )

    expected = whole(make(0))
    assert "at 7" in expected
    for before, after, count in [(0, 2, 5), (2, 0, 8), (1, 2, len(expected))]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


def test_tensor_datasets_are_resumed_natively() -> None:
    dataset = TensorDataset(torch.arange(100), torch.randn(100, 3))

    def make() -> Any:
        return DataLoader(dataset, 7, shuffle=True, num_workers=2)

    expected = whole(make)
    for count in (1, 8, len(expected)):
        assert rest_of(make, state_after(make, count)) == expected[count:]


def test_persistent_workers_end_when_a_state_is_loaded() -> None:
    loader = DataLoader(Counted(), 4, num_workers=2, persistent_workers=True)
    iterator: Any = iter(loader)
    expected = take(iterator, 99)
    workers = iterator._workers
    state = state_after(lambda: DataLoader(Counted(), 4), 2)
    loader.load_state_dict(state)
    assert not any(worker.is_alive() for worker in workers)
    assert take(iter(loader), 99) == expected[2:]
    assert take(iter(loader), 99) == expected
    loader.load_state_dict({})
    assert take(iter(loader), 99) == expected


def test_the_state_is_there_after_a_break() -> None:
    for workers in (0, 2):
        loader = DataLoader(Counted(), 4, num_workers=workers)
        for _ in loader:
            break
        assert loader.state_dict()["_num_yielded"] == 1


@pytest.mark.slow
def test_another_process_resumes() -> None:
    program = (
        "import json, sys, torch\n"
        "from penstock import DataLoader\n"
        "loader = DataLoader(range(20), 3, shuffle=True, num_workers=int(sys.argv[1]))\n"
        "loader.load_state_dict(json.load(sys.stdin))\n"
        "print([batch.tolist() for batch in loader])\n"
    )
    seed_all(5)
    loader = DataLoader(range(20), 3, shuffle=True, num_workers=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    state = json.dumps(loader.state_dict())
    rest = repr([batch.tolist() for batch in iterator])
    for workers in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", program, workers],
            input=state,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == rest


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"batch_size": 5}, "batch_size 4 and this one has batch_size 5"),
        ({"drop_last": True}, "drop_last False and this one has drop_last True"),
        ({"dataset": Counted(9)}, f"dataset length {COUNT} and this one has dataset length 9"),
        ({"dataset": Shards()}, "kind 'map' and this one has kind 'iterable'"),
        ({"seeding": "batch"}, "seeding 'worker' and this one has seeding 'batch'"),
        ({"shuffle": True}, "sampler 'SequentialSampler' and this one has sampler 'RandomS"),
        ({"sampler": Backwards()}, "this one has sampler 'Backwards'"),
    ],
)
def test_a_loader_that_is_built_differently_refuses(others: dict[str, Any], words: str) -> None:
    state = state_after(lambda: DataLoader(Counted(), batch_size=4), 2)
    loader: Any = DataLoader(**{"dataset": Counted(), "batch_size": 4, **others})
    error = error_of(lambda: loader.load_state_dict(state))
    assert type(error) is ValueError
    assert words in str(error)


def test_another_batch_sampler_is_refused() -> None:
    def make(size: int) -> Any:
        return DataLoader(Counted(), batch_sampler=BatchSampler(Backwards(), size, False))

    state = make(3).state_dict()
    error = error_of(lambda: make(4).load_state_dict(state))
    assert type(error) is ValueError
    assert "BatchSampler of 3 over Backwards" in str(error)


def test_another_number_of_shards_is_refused() -> None:
    state = state_after(lambda: DataLoader(Shards(), batch_size=3, num_workers=2), 2)
    error = error_of(lambda: DataLoader(Shards(), batch_size=3).load_state_dict(state))
    assert type(error) is ValueError
    assert "shards 2 and this one has shards 1" in str(error)


def test_what_is_no_state_of_ours_is_refused() -> None:
    loader = DataLoader(Counted(), batch_size=4)
    error = error_of(lambda: loader.load_state_dict({"_snapshot": {}}))
    assert type(error) is ValueError
    assert "the keys ['_snapshot'], which are not those" in str(error)
    state = {**loader.state_dict(), "version": 99}
    error = error_of(lambda: loader.load_state_dict(state))
    assert type(error) is ValueError
    assert "version 99 and this penstock reads version 1" in str(error)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Counted(), num_workers=2, in_order=False), "set in_order=True"),
        (DataLoader(IterableWrapper(range(3))), "the dataset is a datapipe"),
    ],
    ids=["free order", "datapipe"],
)
def test_where_there_is_no_state_there_is_no_state_dict(loader: Any, words: str) -> None:
    error = error_of(lambda: loader.state_dict())
    assert isinstance(error, UnsupportedError)
    assert words in str(error)
    assert not hasattr(loader, "state_dict"), "accelerate calls it where it is"
    error = error_of(lambda: loader.load_state_dict({}))
    assert isinstance(error, UnsupportedError)


def test_accelerates_corrections_are_heeded() -> None:
    """Its dispatcher takes back the batches that it holds for other ranks."""
    for dataset in (Counted(), Shards()):
        make = lambda dataset=dataset: DataLoader(dataset, 4, seeding="batch")  # noqa: E731
        expected = whole(make)
        state = state_after(make, 3)
        state["_sampler_iter_yielded"] -= 1
        state["_num_yielded"] -= 1
        assert rest_of(make, state) == expected[2:]


def test_an_interrupted_batch_is_given_after_the_resume() -> None:
    class Interrupted(Counted):
        is_armed = True

        def __getitem__(self, index: int) -> Any:
            if index == 9 and self.is_armed:
                Interrupted.is_armed = False
                raise KeyboardInterrupt
            return index

    def make() -> Any:
        return DataLoader(Interrupted(), 4)

    loader = make()
    iterator = iter(loader)
    take(iterator, 2)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = through_json(loader.state_dict())
    assert state["_num_yielded"] == 2
    expected = whole(make)
    assert rest_of(make, state) == expected[2:]
    assert take(iterator, 1) == expected[3:4], "as torch's iterator goes on"
    assert rest_of(make, through_json(loader.state_dict())) == expected[4:]


@pytest.mark.slow
def test_workers_that_are_spawned_resume_too() -> None:
    def make() -> Any:
        return DataLoader(
            Shards(), 3, num_workers=2, seeding="batch", multiprocessing_context="spawn"
        )

    expected = whole(lambda: DataLoader(Shards(), 3, num_workers=2, seeding="batch"))
    state = state_after(
        lambda: DataLoader(Shards(), 3, num_workers=1, shards=2, seeding="batch"), 4
    )
    assert rest_of(make, state) == expected[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_cannot_take_its_state_back_says_so_in_the_place_of_a_batch(
    workers: int,
) -> None:
    class Refusing(Remembering):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise LookupError("no such place")

    def make() -> Any:
        return DataLoader(Refusing(), 3, num_workers=workers)

    loader = make()
    loader.load_state_dict(state_after(make, 2))
    error = error_of(lambda: next(iter(loader)))
    assert type(error) is LookupError
    assert "no such place" in str(error)


def test_a_copy_of_a_loader_begins_anew_or_from_what_was_loaded() -> None:
    import pickle

    loader = DataLoader(Counted(), 4, num_workers=2)
    expected = take(iter(loader), 99)
    state = state_after(lambda: DataLoader(Counted(), 4), 2)
    assert take(iter(pickle.loads(pickle.dumps(loader))), 99) == expected
    loader.load_state_dict(state)
    assert take(iter(pickle.loads(pickle.dumps(loader))), 99) == expected[2:]
