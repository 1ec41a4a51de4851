# SPDX-License-Identifier: Apache-2.0
"""Programs that were written for torchdata's StatefulDataLoader: its argument, the checkpoints that
it saved, the errors that pass through it, and the uses of its states."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from resumed_streams import (
    COUNT,
    Counted,
    Shards,
    StatefulSampler,
    rest_of,
    state_after,
    take,
    whole,
)
from stream_oracle import error_of
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import DataLoader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, np.int64(3)])
def test_state_is_exact_for_any_snapshot_interval(workers: int, steps: int) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, num_workers=workers, snapshot_every_n_steps=steps)

    expected = whole(make)
    for count in (1, 3):
        assert rest_of(make, state_after(make, count)) == expected[count:]


@pytest.mark.parametrize(("steps", "kind"), [(-2, ValueError), ("1", TypeError), (1.5, TypeError)])
def test_invalid_snapshot_interval_is_rejected(steps: Any, kind: type) -> None:
    error = error_of(lambda: DataLoader(Counted(), snapshot_every_n_steps=steps))
    assert type(error) is kind
    assert str(error).startswith("snapshot_every_n_steps must be ") and f"got {steps!r};" in str(
        error
    )


@pytest.mark.parametrize("is_under_way", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"dataset": Counted(), "shuffle": True},
        lambda: {"dataset": Counted(), "sampler": StatefulSampler()},
        lambda: {"dataset": Shards()},
    ],
    ids=["map", "stateful sampler", "iterable"],
)
def test_torchdata_checkpoint_is_rejected(options: Any, workers: int, is_under_way: bool) -> None:
    theirs: Any = StatefulDataLoader(**options(), batch_size=4, num_workers=workers)
    iterator = iter(theirs)
    for _ in zip(range(1 if is_under_way else COUNT), iterator, strict=False):
        pass
    loader: Any = DataLoader(**options(), batch_size=4, num_workers=workers)
    error = error_of(lambda: loader.load_state_dict(theirs.state_dict()))
    assert type(error) is ValueError
    assert "was saved by torchdata's StatefulDataLoader" in str(error)
    assert "finish the epoch with torchdata, or start a new epoch" in str(error)
    assert len([*loader]) > 0, "the loader is as it was"


class Refusal(LookupError):
    pass


class Refuses(IterableDataset[int]):
    """Raises in one of the methods that a loader calls in a worker, before the first sample."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __iter__(self) -> Iterator[int]:
        if self.where == "__iter__":
            raise Refusal("no such shard")
        return iter(range(12))

    def state_dict(self) -> dict[str, Any]:
        if self.where == "state_dict":
            raise Refusal("no such shard")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.where == "load_state_dict":
            raise Refusal("no such shard")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", ["__iter__", "load_state_dict"])
def test_early_worker_error_is_raised_by_next(where: str, persistent: bool) -> None:
    def make(loader_class: Any, where: str) -> Any:
        return loader_class(
            Refuses(where), batch_size=2, num_workers=2, persistent_workers=persistent
        )

    def outcome(loader_class: Any) -> tuple[type, str]:
        first = make(loader_class, "")
        first.state_dict()  # torchdata's workers send their states from the start
        iterator = iter(first)
        for _ in range(2):  # one of each worker
            next(iterator)
        loader = make(loader_class, where)
        if where == "load_state_dict":
            loader.load_state_dict(first.state_dict())
        error = error_of(lambda: next(iter(loader)))
        return type(error), str(error).splitlines()[-1]

    assert outcome(DataLoader) == outcome(StatefulDataLoader)
    assert outcome(DataLoader)[0] is Refusal
    assert multiprocessing.active_children() == []


class CountsPasses(IterableDataset[list[int]]):
    """Samples that contain how often this process has started to iterate. Its state grows."""

    def __init__(self) -> None:
        self.passes = 0
        self.log: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        skipped = len(self.log)
        for place in range(skipped, 9):
            self.log.append(place)
            yield [self.passes, place]

    def state_dict(self) -> dict[str, Any]:
        return {"log": self.log}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log = state["log"]


@pytest.mark.parametrize("workers", [0, 2])
def test_state_is_not_changed_by_the_running_loader(workers: int) -> None:
    loader: Any = DataLoader(CountsPasses(), batch_size=None, num_workers=workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    rest = [sample[1] for sample in iterator]
    assert state == before
    again: Any = DataLoader(CountsPasses(), batch_size=None, num_workers=workers)
    again.load_state_dict(state)
    assert again.state_dict() == before
    samples = [*again]
    assert [place for _, place in samples] == rest
    assert {passes for passes, _ in samples} == {1}, "a worker begins to iterate once"
    assert state == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_early_state_after_resume_keeps_all_worker_states(
    persistent: bool,
) -> None:
    def make() -> Any:
        return DataLoader(
            CountsPasses(), batch_size=None, num_workers=4, persistent_workers=persistent
        )

    loader = make()
    iterator = iter(loader)
    for _ in range(11):
        next(iterator)
    state = loader.state_dict()
    expected = [sample[1] for sample in iterator][2:]
    loader.load_state_dict(state)
    resumed = iter(loader)
    for _ in range(2):
        next(resumed)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert [sample[1] for sample in again] == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_state_of_unused_loader_starts_from_the_beginning(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, num_workers=workers)

    loader = make()
    state = loader.state_dict()
    expected = take(iter(loader), 99)
    again = make()
    take(iter(again), 3)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert take(iter(again), 99) == expected
