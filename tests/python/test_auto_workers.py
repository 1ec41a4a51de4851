# SPDX-License-Identifier: Apache-2.0
"""num_workers="auto": the number is chosen from what was measured, and the stream knows nothing."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import multiprocessing
import pickle
import random
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stream_oracle import describe, error_of
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.automatic_count import AutomaticCount
from penstock.usable_cpus import usable_cpus
from penstock.worker_tuner import WorkerTuner


class Augmented(Dataset[Any]):
    """Samples that are random; one fails."""

    def __init__(self, count: int = 60, failing: int = -1) -> None:
        self.count = count
        self.failing = failing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.work()
        if index == self.failing:
            raise LookupError(f"sample {index} after {random.random()}")
        return index, torch.rand(2), random.random(), float(np.random.random())

    def work(self) -> None:
        pass


class Sleeping(Augmented):
    def work(self) -> None:
        time.sleep(0.01)


class Computing(Augmented):
    def work(self) -> None:
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass


class Shard(IterableDataset[Any]):
    def __init__(self, count: int = 40, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.count - 3 * first, step):
            time.sleep(self.seconds)
            yield index, torch.rand(2)


class EagerSampler:
    """Draws from the global generator when it is iterated."""

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(50).tolist())


class OneWay:
    """A sampler that another iteration would not repeat: its numbers are nobody's to put back."""

    def __init__(self) -> None:
        self.generator_of_its_own = random.Random(4)

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        for _ in range(50):
            yield self.generator_of_its_own.randrange(50)


class StatefulSampler:
    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        while self.place < 50:
            self.place += 1
            yield 50 - self.place
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Scheduled(WorkerTuner):
    """Chooses from a list, every few batches, whatever was measured."""

    def __init__(self, counts: list[int], every: int = 3) -> None:
        super().__init__()
        self.counts = counts
        self.every = every

    def is_due(self, workers: int) -> bool:
        return self.meter.has_seen(0.0, self.every)

    def choose(self, shards: int | None) -> int:
        measured = self.meter.take()
        return self.counts.pop(0) if self.counts else measured.workers


def automatic(dataset: Any, counts: list[int], **options: Any) -> Any:
    """A loader whose number of workers changes as it is told here."""
    loader: Any = DataLoader(dataset, num_workers="auto", seeding="batch", **options)
    loader._tuner = Scheduled(list(counts))
    return loader


def stream(loader: Any, epoch_count: int = 2, counts: list[int] | None = None) -> list[Any]:
    """Batches and errors, with the trainer drawing in between, and the generators after it all."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    seen = []
    for _ in range(epoch_count):
        iterator = iter(loader)
        while True:
            try:
                seen.append(describe(next(iterator)))
            except StopIteration:
                break
            except LookupError as error:
                seen.append(str(error).splitlines()[-1].removeprefix("LookupError: "))
            seen.append(describe([torch.rand(1), random.random()]))
            if counts is not None:
                counts.append(len(iterator._workers))
    generators = [loader.generator] if loader.generator is not None else []
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    return [*seen, describe([*states, *(one.get_state() for one in generators)])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"batch_size": 2, "shuffle": True},
        lambda: {"batch_size": 2, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
        lambda: {"batch_size": 2, "drop_last": True, "prefetch_bytes": 1000},
        lambda: {"batch_size": 2, "sampler": EagerSampler()},
        lambda: {"batch_size": 2, "sampler": OneWay(), "prefetch_factor": 4},
        lambda: {"batch_size": 2, "sampler": StatefulSampler()},
        lambda: {"batch_size": None, "shuffle": True},
        lambda: {"batch_size": 2, "dataset": Augmented(failing=33)},
        lambda: {"batch_size": 2, "sampler": OneWay(), "dataset": Augmented(failing=33)},
        lambda: {"batch_size": 2, "dataset": TensorDataset(torch.rand(400, 3)), "shuffle": True},
    ],
    ids=[
        "shuffled",
        "own generator",
        "bound on bytes",
        "eager sampler",
        "one way sampler",
        "stateful sampler",
        "single samples",
        "an error",
        "an error and own sampler",
        "deep prefetch",
    ],
)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_changes_in_the_middle_of_epochs_are_not_to_be_seen(make: Any, is_persistent: bool) -> None:
    torch.manual_seed(3)
    options = {"dataset": Augmented(), "persistent_workers": is_persistent, **make()}
    expected = stream(DataLoader(seeding="batch", num_workers=2, **options))
    torch.manual_seed(3)
    options = {**options, **make()}
    counts: list[int] = []
    loader = automatic(options.pop("dataset"), [3, 1, 2, 4, 1, 2], **options)
    assert stream(loader, counts=counts) == expected
    changes = sum(one != next_one for one, next_one in zip(counts, counts[1:], strict=False))
    assert changes >= 3, counts


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_are_changed_too(method: str) -> None:
    options: Any = {"batch_size": 2, "shuffle": True}
    expected = stream(DataLoader(Augmented(), seeding="batch", **options), 1)
    counts: list[int] = []
    loader = automatic(Augmented(), [2, 1], **options, multiprocessing_context=method)
    assert stream(loader, 1, counts) == expected
    assert set(counts) == {1, 2}


@pytest.mark.slow
def test_a_batch_of_microseconds_is_measured_in_bounded_memory() -> None:
    loader: Any = DataLoader(
        TensorDataset(torch.zeros(60_000)), num_workers="auto", seeding="batch", batch_size=2
    )
    assert sum(1 for _ in loader) == 30_000
    meter = loader._tuner.meter
    assert len(meter._trainer_seconds) <= 10_000


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"dataset": Shard(), "shards": 3}, {"dataset": Augmented(), "in_order": False}],
    ids=["iterable", "free order"],
)
def test_between_epochs_the_number_changes_where_it_cannot_within_one(
    options: dict[str, Any], is_persistent: bool
) -> None:
    options = {**options, "batch_size": 2, "persistent_workers": is_persistent}
    expected = stream(DataLoader(seeding="batch", num_workers=2, **options), 4)
    counts: list[int] = []
    loader = automatic(counts=[3, 1, 2], **options)
    seen = stream(loader, 4, counts)
    if options.get("in_order", True):
        assert seen == expected
    else:
        assert sorted(map(repr, seen)) == sorted(map(repr, expected))
    assert set(counts) >= {1, 2, 3}
    assert sum(one != next_one for one, next_one in zip(counts, counts[1:], strict=False)) <= 3


def test_an_abandoned_epoch_leaves_nothing_to_the_next() -> None:
    def stream_with_a_break(loader: Any) -> list[Any]:
        torch.manual_seed(2)
        seen = []
        for stop in (7, 4, 100):
            for place, batch in enumerate(loader):
                seen.append(describe(batch))
                if place == stop:
                    break
        return seen

    for is_persistent in (False, True):
        options: Any = {"batch_size": 2, "shuffle": True, "persistent_workers": is_persistent}
        loader = automatic(Augmented(), [3, 1, 2, 3, 1], **options)
        fixed = DataLoader(Augmented(), seeding="batch", num_workers=1, **options)
        assert stream_with_a_break(loader) == stream_with_a_break(fixed)


def test_an_older_iterator_goes_on_with_the_workers_that_it_has() -> None:
    loader = automatic(Augmented(), [3, 2], batch_size=2)
    torch.manual_seed(5)
    first, second = iter(loader), iter(loader)
    workers = len(first._workers)
    both = [(describe(one), describe(other)) for one, other in zip(first, second, strict=True)]
    assert len(both) == 30
    assert len(first._workers) == workers
    assert int(loader.num_workers) == 2


def test_an_iterator_outlives_its_loader() -> None:
    assert len(list(iter(automatic(Augmented(), [3, 2], batch_size=2)))) == 30


@pytest.mark.parametrize("sampler", [None, OneWay, StatefulSampler])
def test_a_state_taken_after_a_change_resumes_with_any_number(sampler: Any) -> None:
    def options() -> dict[str, Any]:
        chosen = {"shuffle": True} if sampler is None else {"sampler": sampler()}
        return {"batch_size": 2, **chosen}

    torch.manual_seed(8)
    loader = automatic(Augmented(), [3, 1], **options())
    iterator = iter(loader)
    for _ in range(13):
        next(iterator)
    assert len(iterator._workers) == 1
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [describe(batch) for batch in iterator]
    assert len(rest) == (30 if sampler is None else 25) - 13
    again: Any = automatic(Augmented(), [2, 3], **options())
    for other in (again, DataLoader(Augmented(), seeding="batch", **options())):
        other.load_state_dict(state)
        assert [describe(batch) for batch in other] == rest


def test_batches_that_are_kept_stay_as_they_were() -> None:
    torch.manual_seed(4)
    kept = list(automatic(Augmented(200), [3, 1, 2, 3, 1, 2], batch_size=2, shuffle=True))
    torch.manual_seed(4)
    fixed = DataLoader(Augmented(200), batch_size=2, shuffle=True, seeding="batch")
    assert [describe(batch) for batch in kept] == [describe(batch) for batch in fixed]


def test_stats_add_up_over_the_changes() -> None:
    loader = automatic(Augmented(), [3, 1, 2], batch_size=2)
    for epoch in (1, 2):
        assert len(list(loader)) == 30
        assert loader.stats().batches == 30 * epoch
    assert loader.stats().worker_choice is None


class FewWorkers(multiprocessing.context.ForkContext):
    """Has no more than two processes at once."""

    @staticmethod
    def Process(**options: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(**options)
        if len(multiprocessing.active_children()) >= 2:
            process.start = refuse  # type: ignore[method-assign]
        return process


def refuse() -> None:
    raise OSError(11, "Resource temporarily unavailable")


def test_workers_that_cannot_be_started_are_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: Any = {"batch_size": 2, "shuffle": True}
    expected = stream(DataLoader(Augmented(), seeding="batch", **options))
    context = FewWorkers()
    loader = automatic(Augmented(), [2, 4], **options, multiprocessing_context=context)
    assert stream(loader) == expected
    assert int(loader.num_workers) == 2
    assert "4 workers could not be started" in caplog.text
    assert "the loader goes on with 2" in caplog.text


def measured(dataset: Any, epoch_count: int = 3, **options: Any) -> Any:
    """A loader that has chosen by itself, quickly, for a trainer that does little."""
    loader: Any = DataLoader(dataset, num_workers="auto", seeding="batch", **options)
    assert loader.worker_choice is None
    loader._tuner = WorkerTuner(window_s=0.1)
    for _ in range(epoch_count):
        for _ in loader:
            time.sleep(0.001)
    return loader


SENTENCE = re.compile(
    r"\d+ workers?: .*the trainer waited \d+% of the time.*; a batch takes \S+ m?s of a worker"
    r"(, \d+% of it on a CPU,)? and \S+ m?s of the trainer, and \d+ CPUs? (is|are) free to use"
)


@pytest.mark.slow
@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_dataset_that_waits_gets_more_workers_and_the_log_says_why(
    is_persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This DataLoader will create")
        loader = measured(Sleeping(), batch_size=2, shuffle=True, persistent_workers=is_persistent)
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert re.match(r"\d+ workers: the trainer waited \d\d% of the time for [12];", said[0])
    assert all(map(SENTENCE.fullmatch, said))
    choice = loader.worker_choice
    assert SENTENCE.fullmatch(str(choice))
    assert loader.stats().worker_choice == choice
    assert choice.workers == loader.num_workers
    assert choice.measured.cpu_share < 0.75
    assert choice.limit >= max(2, usable_cpus())


@pytest.mark.slow
def test_a_dataset_that_computes_gets_no_more_workers_than_cpus() -> None:
    loader: Any = DataLoader(Computing(), batch_size=2, num_workers="auto", seeding="batch")
    loader._tuner = WorkerTuner(window_s=0.1)
    most = 0
    for _ in range(3):
        for _ in loader:
            most = max(most, loader.num_workers)
    choice = loader.worker_choice
    assert most <= usable_cpus()
    assert choice.measured.cpu_share > 0.75
    assert SENTENCE.fullmatch(str(choice))


@pytest.mark.slow
def test_an_iterable_dataset_gets_as_many_workers_as_shards_at_most() -> None:
    loader = measured(Shard(200, seconds=0.003), 4, batch_size=2, shards=3)
    assert 1 <= loader.num_workers <= 3
    assert loader.worker_choice.limit == 3


@pytest.mark.slow
def test_idle_workers_are_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    loader: Any = DataLoader(Augmented(), batch_size=2, num_workers="auto", seeding="batch")
    loader.num_workers = AutomaticCount(4)
    loader._tuner = WorkerTuner(window_s=0.1)
    for _ in loader:
        time.sleep(0.02)
    assert loader.num_workers < 4
    assert re.match(r"[12] workers?: .* and 4 were idle \d+% of it;", caplog.messages[0])


def test_the_number_is_an_int_to_everybody() -> None:
    loader = DataLoader(Augmented(), num_workers="auto", seeding="batch")
    assert isinstance(loader.num_workers, int) and loader.num_workers >= 1
    assert f"{loader.num_workers} {json.dumps(loader.num_workers)}" == "{0} {0}".format(
        int(loader.num_workers)
    )
    assert (loader.prefetch_factor, loader.worker_choice) == (2, None)

    class Asking(Augmented):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None
            return type(info.num_workers) is int

    asking = DataLoader(Asking(4), num_workers="auto", seeding="batch", collate_fn=all)
    assert list(asking) == [True] * 4


def test_a_number_assigned_later_ends_the_choosing() -> None:
    loader: Any = automatic(Augmented(), [1, 2, 3], batch_size=2)
    loader.num_workers = 2
    counts: list[int] = []
    stream(loader, counts=counts)
    assert set(counts) == {2}


def public_attributes(loader: Any) -> dict[str, Any]:
    """What Lightning and ignite build a loader anew from."""
    names = inspect.signature(type(loader).__init__).parameters
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    assert set(attributes) <= set(names)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
        del attributes[name]
    return attributes


def test_a_loader_made_anew_from_the_attributes_chooses_too() -> None:
    loader: Any = automatic(Augmented(), [], prefetch_factor=3)
    loader.num_workers = AutomaticCount(50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again: Any = DataLoader(batch_size=2, shuffle=True, **public_attributes(loader))
    assert type(again.num_workers) is AutomaticCount
    assert 1 <= again.num_workers <= usable_cpus()
    again._tuner = Scheduled([2, 1, 3])
    counts: list[int] = []
    stream(again, counts=counts)
    assert set(counts) >= {1, 2, 3}


def test_without_batch_seeding_the_number_of_such_a_loader_is_a_plain_one() -> None:
    """Accelerate copies torch's options and leaves penstock's own out."""
    loader = DataLoader(Augmented(), num_workers="auto", seeding="batch")
    again = DataLoader(Augmented(), num_workers=loader.num_workers, prefetch_factor=2)
    assert type(again.num_workers) is int
    assert again.num_workers == loader.num_workers


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_chooses_by_itself(copied: Any) -> None:
    loader: Any = automatic(Augmented(), [3], batch_size=2, shuffle=True)
    expected = stream(loader)
    assert int(loader.num_workers) == 3
    again = copied(loader)
    assert type(again.num_workers) is AutomaticCount
    assert int(again.num_workers) == 3
    assert again.worker_choice is None
    again._epoch_count = 0
    again._tuner = Scheduled([1, 2])
    assert stream(again) == expected
    assert int(again.num_workers) == 2


class StatefulRows(Augmented):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({}, ValueError, "num_workers is 'auto' with seeding=None, where each worker has random"),
        ({"seeding": "worker"}, ValueError, "with seeding='worker'"),
        ({"seeding": "x"}, ValueError, "seeding is 'x'"),
        (
            {"dataset": Shard(), "seeding": "batch"},
            ValueError,
            "with shards=None, where each worker reads a shard of the Shard",
        ),
        ({"dataset": Shard(), "shards": 2}, ValueError, "without seeding='batch'"),
        ({"dataset": Shard(), "seeding": "batch", "shards": "2"}, TypeError, "shards is '2'"),
        ({"dataset": IterableWrapper([1]), "seeding": "batch"}, ValueError, "is a datapipe"),
        ({"dataset": StatefulRows(), "seeding": "batch"}, ValueError, "a state of its own"),
        ({"seeding": "batch", "timeout": -1}, ValueError, "timeout option should be non-negative"),
        (
            {"seeding": "batch", "prefetch_factor": -1},
            ValueError,
            "prefetch_factor option should be non-negative",
        ),
        ({"seeding": "batch", "fetch_threads": 0}, ValueError, "fetch_threads is 0"),
    ],
)
def test_what_cannot_be_chosen_for_is_refused(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    error = error_of(
        lambda: DataLoader(**{"dataset": Augmented(), **options, "num_workers": "auto"})
    )
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize("number", ["many", "AUTO", "", b"auto"])
def test_another_word_is_torchs_error(number: Any) -> None:
    error = error_of(lambda: DataLoader(Augmented(), num_workers=number, seeding="batch"))
    torchs = error_of(lambda: torch.utils.data.DataLoader(Augmented(), num_workers=number))
    assert describe(error) == describe(torchs)


def test_what_is_assigned_later_is_looked_at_by_iter() -> None:
    loader: Any = DataLoader(Augmented(), num_workers="auto", seeding="batch")
    loader.seeding = None
    assert "pass it, or a number of workers" in str(error_of(lambda: iter(loader)))
    loader = DataLoader(Augmented(), seeding="batch")
    loader.num_workers = "auto"
    error = error_of(lambda: iter(loader))
    assert type(error) is ValueError
    assert "set to 'auto' after construction" in str(error)
