# SPDX-License-Identifier: Apache-2.0
"""States have no cost until one is requested, and then about one in snapshot_every_n_steps.

A loader requested the states of its sampler and its dataset at every batch. A sampler that keeps
its order there made the swapped import a hundred times slower, a mixture of many sources filled the
memory, and programs whose objects had no state to give yet did not run.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_streams import (
    COUNT,
    Counted,
    Counting,
    Remembering,
    Shards,
    StatefulSampler,
    WithCursor,
    rest_of,
    seed_all,
    take,
    through_json,
    whole,
)
from torch.utils.data import Dataset, IterableDataset, Sampler

from penstock import DataLoader, MixtureSampler
from penstock.loader.options import LoaderOptions
from penstock.stream.shard_state import copied_state

WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]


class CountsStateRequests:
    """Counts how often its state was requested, in any process."""

    def __init__(self, noted: Path) -> None:
        self.noted = noted
        noted.touch()

    @property
    def asked_count(self) -> int:
        return self.noted.stat().st_size

    def state_dict(self) -> dict[str, Any]:
        with self.noted.open("ab") as file:
            file.write(b".")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CountedMap(CountsStateRequests, Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


class CountedIterator(CountsStateRequests):
    def __init__(self, noted: Path) -> None:
        super().__init__(noted)
        self.left = iter(range(20))

    def __next__(self) -> int:
        return next(self.left)


class CountedStream(CountsStateRequests, IterableDataset[int]):
    def __iter__(self) -> Any:
        return CountedIterator(self.noted)


class CountedSampler(CountsStateRequests, Sampler[int]):
    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("dataset_class", [CountedMap, CountedStream])
def test_no_state_is_requested_before_the_first_state_dict(
    dataset_class: Any, workers: dict[str, Any], tmp_path: Path
) -> None:
    dataset, sampler = dataset_class(tmp_path / "dataset"), CountedSampler(tmp_path / "sampler")
    is_map = dataset_class is CountedMap
    loader = DataLoader(dataset, 2, sampler=sampler if is_map else None, **workers)
    for _ in range(2):
        for _ in loader:
            pass
    for _ in zip(range(3), loader, strict=False):
        pass
    assert (dataset.asked_count, sampler.asked_count) == (0, 0)
    loader.state_dict()


class NotReady:
    """Has a state once it was iterated, or never."""

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("iterate me first")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody has a state of it")


class NotReadyMap(NotReady, Counted):
    pass


class NotReadyStream(NotReady, Shards):
    pass


class NotReadySampler(NotReady, Sampler[int]):
    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


NOT_READY: dict[str, Any] = {
    "sampler": lambda: {"dataset": Counted(), "sampler": NotReadySampler()},
    "map": lambda: {"dataset": NotReadyMap()},
    "iterable": lambda: {"dataset": NotReadyStream()},
}


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("case", NOT_READY.values(), ids=NOT_READY)
def test_unready_state_raises_only_from_state_dict(case: Any, workers: dict[str, Any]) -> None:
    def epochs(loader_class: Any) -> list[Any]:
        torch.manual_seed(4)
        loader = loader_class(batch_size=4, **case(), **workers)
        return [take(iter(loader), 99) for _ in range(2)]

    with warnings.catch_warnings():
        warnings.simplefilter("error", pytest.PytestUnraisableExceptionWarning)
        assert [len(one) for one in epochs(DataLoader)] == [
            len(one) for one in epochs(torch.utils.data.DataLoader)
        ]
        loader = DataLoader(batch_size=4, **case(), **workers)
        whole_epoch = take(iter(loader), 99)
        iterator = iter(loader)
        seen = take(iterator, 2)
        for _ in range(2 if workers["num_workers"] == 0 else 0):
            with pytest.raises(RuntimeError, match=r"state_dict\(\).*iterate me first"):
                loader.state_dict()
        assert len(seen + take(iterator, 99)) == len(whole_epoch), "no batch suffers from it"
        gc.collect()


@pytest.mark.parametrize("case", NOT_READY.values(), ids=NOT_READY)
def test_unready_worker_state_raises_only_from_state_dict(case: Any) -> None:
    loader = DataLoader(batch_size=4, num_workers=2, **case())
    loader._run.want_states(LoaderOptions.of(loader))
    iterator = iter(loader)
    seen = take(iterator, 3)
    with pytest.raises(RuntimeError, match=r"state_dict\(\).*iterate me first"):
        loader.state_dict()
    expected = len(take(iter(DataLoader(batch_size=4, num_workers=2, **case())), 99))
    assert len(seen + take(iterator, 99)) == expected


# ---- Exact at every place, regardless of when the first state was requested

DATASETS: dict[str, Any] = {
    "sampler": lambda: {"dataset": Counted(), "sampler": StatefulSampler()},
    "mixture": lambda: {
        "dataset": Counted(),
        "sampler": MixtureSampler([10, 13], [0.3, 0.7], seed=2),
    },
    "map": lambda: {"dataset": Counting(), "shuffle": True},
    "keeps its place": lambda: {"dataset": Remembering()},
    "cursor": lambda: {"dataset": WithCursor()},
}


def make_loader(case: Any, **options: Any) -> Any:
    return DataLoader(batch_size=4, **case(), **options)


def states_of_run(make: Any, first_asked: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The batches of an epoch, and the states after each from ``first_asked`` batches on."""
    seed_all(7)
    loader = make()
    iterator = iter(loader)
    seen = take(iterator, first_asked)
    states = [through_json(loader.state_dict())]
    while batch := take(iterator, 1):
        seen += batch
        states.append(through_json(loader.state_dict()))
    return seen, states


@pytest.mark.slow
@pytest.mark.long(
    *(f"{name}-2-{every}" for name in ("sampler", "map", "cursor") for every in (3, 0)),
    *(f"{name}-2-{every}" for name in ("mixture", "keeps its place") for every in (1, 100)),
)
@pytest.mark.parametrize("every", [1, 3, 100, 0])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", DATASETS.values(), ids=DATASETS)
def test_states_are_exact_wherever_the_first_is_requested(
    case: Any, workers: int, every: int
) -> None:
    def make() -> Any:
        return DataLoader(
            batch_size=4,
            num_workers=workers,
            snapshot_every_n_steps=every,
            generator=torch.Generator().manual_seed(3),
            **case(),
        )

    expected = whole(make)
    for first_asked in (0, 1, 3):
        seen, states = states_of_run(make, first_asked)
        assert seen == expected
        for place, state in enumerate(states[:-1], first_asked):
            if place in (first_asked, first_asked + 2, len(expected) - 1):
                assert rest_of(make, state) == expected[place:]


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_state_is_requested_every_n_steps(workers: int, tmp_path: Path) -> None:
    sampler = CountedSampler(tmp_path / "sampler")
    loader = DataLoader(
        list(range(40)),  # type: ignore[arg-type]
        2,
        sampler=sampler,
        num_workers=workers,
        snapshot_every_n_steps=5,
    )
    loader.state_dict()
    before = sampler.asked_count
    for _ in loader:
        loader.state_dict()
    assert sampler.asked_count - before <= 20 / 5 + 3


def test_sampler_state_is_requested_on_demand_without_workers(tmp_path: Path) -> None:
    sampler = CountedSampler(tmp_path / "sampler")
    loader = DataLoader(list(range(40)), 2, sampler=sampler)  # type: ignore[arg-type]
    loader.state_dict()
    batches = iter(loader)
    before = sampler.asked_count
    take(batches, 9)
    assert sampler.asked_count == before
    loader.state_dict()
    assert sampler.asked_count == before + 1


class Shared(list[int]):
    pass


def test_copied_state_matches_deepcopy() -> None:
    numbers, tensor = [1, 2.5, "a", None, True, b"b"], torch.arange(3)
    state: dict[Any, Any] = {
        "order": numbers,
        "again": [numbers, {"inner": numbers}],
        "words": torch.arange(4),
        "pair": (numbers, tensor),
        "of a class": Shared([1]),
        "in a list": [1, Shared([2]), tensor],
        3: OrderedDict(a=[1]),
    }
    state["itself"] = state
    copied = copied_state(state)
    assert copied["itself"] is copied and copied is not state
    assert copied["order"] == numbers and copied["order"] is not numbers
    assert copied["again"][0] is copied["again"][1]["inner"] is copied["order"]
    assert copied["pair"][0] is copied["order"]
    assert copied["pair"][1] is copied["in a list"][2] is not tensor
    assert type(copied["of a class"]) is type(copied["in a list"][1]) is Shared
    assert copied["in a list"][1] is not state["in a list"][1]
    assert copied[3] == {"a": [1]} and copied[3]["a"] is not state[3]["a"]
    copied["words"][0] = 9
    assert state["words"][0] == 0


def test_worker_dataset_state_is_requested_every_n_steps(tmp_path: Path) -> None:
    dataset = CountedMap(tmp_path / "dataset")
    loader = DataLoader(dataset, 1, num_workers=2, snapshot_every_n_steps=10)
    loader.state_dict()
    before = dataset.asked_count
    for _ in loader:
        loader.state_dict()
    assert dataset.asked_count - before == 40 / 10 * 2


class KeptStates(dict[str, Any]):
    alive = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        KeptStates.alive += 1

    def __deepcopy__(self, memo: Any) -> KeptStates:
        return KeptStates(self)

    def __del__(self) -> None:
        KeptStates.alive -= 1


class KeepingSampler(CountedSampler):
    def __len__(self) -> int:
        return 600

    def __iter__(self) -> Iterator[int]:
        return iter([place % 40 for place in range(600)])

    def state_dict(self) -> dict[str, Any]:
        return KeptStates()


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_states_are_bounded_by_prefetched_batches(workers: int, tmp_path: Path) -> None:
    loader = DataLoader(
        list(range(40)),  # type: ignore[arg-type]
        2,
        sampler=KeepingSampler(tmp_path / "sampler"),
        num_workers=workers,
    )
    loader.state_dict()
    alive = 0
    for _ in loader:
        alive = max(alive, KeptStates.alive)
    assert alive <= 2 * 2 + 6


def test_first_state_after_a_break_is_exact() -> None:
    for case in DATASETS.values():
        for workers in (0, 2):
            make = partial(make_loader, case, num_workers=workers)
            expected = whole(make)
            seed_all(7)
            loader = make()
            for _ in zip(range(3), loader, strict=False):
                pass
            state = through_json(loader.state_dict())
            count = state["_num_yielded"]
            assert rest_of(make, state) == expected[count:]


def test_late_first_state_with_persistent_workers_warns() -> None:
    loader = DataLoader(Remembering(), 4, num_workers=1, persistent_workers=True)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(UserWarning, match="call state_dict\\(\\) once before the first iter"):
        loader.state_dict()


@pytest.mark.slow
def test_worker_death_between_epochs_raises_without_waiting() -> None:
    loader = DataLoader(Shards(), 4, num_workers=2, persistent_workers=True)
    loader.state_dict()
    list(loader)
    worker: Any = loader._iterator._workers[1]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker .* is killed by signal: Killed"):
        iter(loader)


class SilentWorkers(Counted):
    def state_dict(self) -> dict[str, Any]:
        if torch.utils.data.get_worker_info() is not None:
            threading.Event().wait()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.slow
def test_worker_that_sends_no_state_times_out() -> None:
    loader = DataLoader(
        SilentWorkers(),
        4,
        num_workers=2,
        persistent_workers=True,
        timeout=2,
        snapshot_every_n_steps=0,
    )
    loader.state_dict()
    list(loader)
    with pytest.raises(RuntimeError, match=r"after 2 seconds: workers \[0, 1\] did not report"):
        iter(loader)


def test_state_requests_do_not_affect_another_loader(tmp_path: Path) -> None:
    dataset = CountedMap(tmp_path / "dataset")
    first, second = (DataLoader(dataset, 4, num_workers=1) for _ in range(2))
    first.state_dict()
    list(second)
    assert dataset.asked_count == 0


# ---- Passes after the resumed one


class ResumesInEveryPass(IterableDataset[int]):
    """As a stream of Hugging Face: in each pass it resumes from the state that it was given."""

    def __init__(self) -> None:
        self.start: dict[str, Any] | None = None
        self.now: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        begin = 0 if self.start is None else self.start["given"]
        self.now = {"given": begin}
        for index in range(first + step * begin, 64, step):
            self.now = {"given": self.now["given"] + 1}
            yield index

    def state_dict(self) -> Any:
        return self.now and dict(self.now)

    def load_state_dict(self, state: Any) -> None:
        self.start = state


def hugging_face_stream() -> Any:
    datasets = pytest.importorskip("datasets")
    of_rows = datasets.Dataset.from_dict({"index": list(range(64))})
    return of_rows.to_iterable_dataset(num_shards=4)


def indices_of(samples: list[Any]) -> list[int]:
    return [one["index"] if isinstance(one, dict) else one for one in samples]


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("make_dataset", [ResumesInEveryPass, hugging_face_stream])
@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_epochs_after_a_resumed_one_are_whole(
    make_dataset: Any, workers: dict[str, Any], seeding: Any
) -> None:
    """Persistent workers resumed at the same place in every later epoch: 64, 54, 54 samples."""

    def make() -> Any:
        return DataLoader(make_dataset(), 2, seeding=seeding, collate_fn=indices_of, **workers)

    for count in (5, 30, 31):
        first = make()
        first.state_dict()
        iterator = iter(first)
        given = [index for _ in range(count) for index in next(iterator)]
        state = first.state_dict()
        del iterator
        again = make()
        again.load_state_dict(state)
        epochs = [[index for batch in again for index in batch] for _ in range(3)]
        assert sorted(given + epochs[0]) == list(range(64))
        assert [sorted(one) for one in epochs[1:]] == [list(range(64))] * 2
