# SPDX-License-Identifier: Apache-2.0
"""num_workers="auto": the stream does not depend on how often the pool is replaced."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scheduled_workers import Augmented, Shard, automatic, stream
from stream_oracle import describe
from torch.utils.data import TensorDataset

from penstock import DataLoader


class EagerSampler:
    """Draws from the global generator when it is iterated."""

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(50).tolist())


class OneWay:
    """A sampler that another iteration would not repeat: its numbers cannot be restored."""

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


@pytest.mark.sampled(2)
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
def test_worker_count_changes_within_epochs_keep_the_stream(make: Any, is_persistent: bool) -> None:
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_count_changes_with_spawn_and_forkserver(method: str) -> None:
    options: Any = {"batch_size": 2, "shuffle": True}
    expected = stream(DataLoader(Augmented(), seeding="batch", **options), 1)
    counts: list[int] = []
    loader = automatic(Augmented(), [2, 1], **options, multiprocessing_context=method)
    assert stream(loader, 1, counts) == expected
    assert set(counts) == {1, 2}


@pytest.mark.slow
def test_measurements_of_tiny_batches_use_bounded_memory() -> None:
    loader: Any = DataLoader(
        TensorDataset(torch.zeros(60_000)), num_workers="auto", seeding="batch", batch_size=2
    )
    assert sum(1 for _ in loader) == 30_000
    meter = loader._run.tuner.meter
    assert meter.kept_count <= 10_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"dataset": Shard(), "shards": 3}, {"dataset": Augmented(), "in_order": False}],
    ids=["iterable", "free order"],
)
def test_worker_count_changes_between_epochs_if_not_within(
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


@pytest.mark.long
def test_abandoned_epochs_do_not_affect_later_ones() -> None:
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


def test_older_iterator_keeps_its_workers() -> None:
    loader = automatic(Augmented(), [3, 2], batch_size=2)
    torch.manual_seed(5)
    first, second = iter(loader), iter(loader)
    workers = len(first._workers)
    both = [(describe(one), describe(other)) for one, other in zip(first, second, strict=True)]
    assert len(both) == 30
    assert len(first._workers) == workers
    assert int(loader.num_workers) == 2


def test_iterator_outlives_its_loader() -> None:
    assert len(list(iter(automatic(Augmented(), [3, 2], batch_size=2)))) == 30


@pytest.mark.long("None")
@pytest.mark.parametrize("sampler", [None, OneWay, StatefulSampler])
def test_state_after_worker_change_resumes_with_any_worker_count(sampler: Any) -> None:
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


@pytest.mark.long
def test_kept_batches_survive_worker_count_changes() -> None:
    torch.manual_seed(4)
    kept = list(automatic(Augmented(200), [3, 1, 2, 3, 1, 2], batch_size=2, shuffle=True))
    torch.manual_seed(4)
    fixed = DataLoader(Augmented(200), batch_size=2, shuffle=True, seeding="batch")
    assert [describe(batch) for batch in kept] == [describe(batch) for batch in fixed]


def test_stats_accumulate_across_worker_count_changes() -> None:
    loader = automatic(Augmented(), [3, 1, 2], batch_size=2)
    for epoch in (1, 2):
        assert len(list(loader)) == 30
        assert loader.stats().batches == 30 * epoch
    assert loader.stats().worker_choice is None


class FewWorkers(multiprocessing.context.ForkContext):
    """Has no more than two processes at a time, in addition to the existing ones."""

    def __init__(self) -> None:
        super().__init__()
        self._process_count_max = len(multiprocessing.active_children()) + 2

    def Process(self, **options: Any) -> Any:  # type: ignore[override]
        process = multiprocessing.get_context("fork").Process(**options)
        if len(multiprocessing.active_children()) >= self._process_count_max:
            process.start = refuse  # type: ignore[method-assign]
        return process


def refuse() -> None:
    raise OSError(11, "Resource temporarily unavailable")


@pytest.mark.long
def test_loader_continues_when_workers_cannot_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: Any = {"batch_size": 2, "shuffle": True}
    expected = stream(DataLoader(Augmented(), seeding="batch", **options))
    context = FewWorkers()
    loader = automatic(Augmented(), [2, 4], **options, multiprocessing_context=context)
    assert stream(loader) == expected
    assert int(loader.num_workers) == 2
    assert "4 workers could not be started" in caplog.text
    assert "the loader continues with 2" in caplog.text
