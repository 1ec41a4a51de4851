# SPDX-License-Identifier: Apache-2.0
"""Random loaders, stopped at random places: the remaining stream is the one of torchdata's
StatefulDataLoader. Datasets and their iterators keep counters, private generators and the global
ones."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import DataLoader

Draw = tuple[float, ...]


class Draws:
    """Numbers of a counter, of a private generator or of the global one, with a state."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0
        self.generator = torch.Generator().manual_seed(11)

    def draw(self) -> Draw:
        self.count += 1
        if self.source == "counter":
            return (float(self.count),)
        generator = self.generator if self.source == "own" else None
        return (float(self.count), float(torch.rand((), generator=generator)))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"count": self.count}
        if self.source == "own":
            state["generator"] = self.generator.get_state()
        if self.source == "global":
            state["generator"] = torch.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.source == "own":
            self.generator.set_state(state["generator"])
        if self.source == "global":
            torch.set_rng_state(state["generator"])


class Map(Dataset[Any]):
    def __init__(self, source: str, length: int) -> None:
        self.draws, self.length = Draws(source), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return (float(index), *self.draws.draw())


class StatefulMap(Map):
    def state_dict(self) -> dict[str, Any]:
        return self.draws.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.load_state_dict(state)


class Shard(Iterator[Any]):
    """An iterator over a worker's share, with a separate state."""

    def __init__(self, source: str, length: int) -> None:
        info = get_worker_info()
        self.draws = Draws(source)
        self.length = length if info is None else length // info.num_workers + info.id
        self.id = 0 if info is None else info.id

    def __next__(self) -> Any:
        if self.draws.count == self.length:
            raise StopIteration
        return (float(self.id), *self.draws.draw())

    def state_dict(self) -> dict[str, Any]:
        return self.draws.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.load_state_dict(state)


class OfStatefulIterators(IterableDataset[Any]):
    def __init__(self, source: str, length: int) -> None:
        self.source, self.length = source, length

    def __iter__(self) -> Iterator[Any]:
        return Shard(self.source, self.length)


class CountsPasses(OfStatefulIterators):
    """Has a state, and so have its iterators."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        return Shard(self.source, self.length + self.passes)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class ReadAgain(OfStatefulIterators):
    """Has no state at all."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*Shard("counter", self.length)])


DATASETS: list[Any] = [Map, StatefulMap, OfStatefulIterators, CountsPasses, ReadAgain]


class Case:
    def __init__(self, seed: int) -> None:
        choose = random.Random(seed).choice
        self.dataset_class = choose(DATASETS)
        self.source = choose(["counter", "own", "global"])
        self.length = choose([7, 12, 23])
        self.options: dict[str, Any] = {
            "batch_size": choose([None, 1, 3, 4]),
            "num_workers": choose([0, 0, 1, 2, 3]),
            "snapshot_every_n_steps": choose([1, 3, 100]),
        }
        if self.options["num_workers"] > 0:
            self.options["persistent_workers"] = choose([False, True])
        if self.dataset_class is Map:  # its draws are lost at a resume, in torchdata too
            self.source = "counter"
            self.dataset_class = Plain
        self.epochs_before = choose([0, 0, 1])
        self.batch_count = choose([0, 1, 2, 5])
        self.asks_before = choose([False, True])
        if self.epochs_before and self.options.get("persistent_workers"):
            # Otherwise the state of the workers' datasets and generators at the start of the epoch
            # was not requested, and a warning reports it.
            self.asks_before = True

    def __repr__(self) -> str:
        return repr(vars(self))

    def make(self, loader_class: Any) -> Any:
        return loader_class(
            self.dataset_class(self.source, self.length),
            generator=torch.Generator().manual_seed(5),
            **self.options,
        )


class Plain(Map):
    def __getitem__(self, index: int) -> Any:
        return (float(index),)


def values(batches: Any) -> list[Any]:
    return [torch.stack(list(map(torch.as_tensor, batch))).tolist() for batch in batches]


def streams(case: Case, loader_class: Any) -> list[Any]:
    """The first batches of a loader, the batches after them, or the next epoch, and the batches
    that follow when its state is loaded into another loader."""
    torch.manual_seed(case.length)
    loader = case.make(loader_class)
    if case.asks_before:
        loader.state_dict()
    for _ in range(case.epochs_before):
        values(loader)
    iterator = iter(loader)
    first = values(itertools.islice(iterator, case.batch_count))
    is_finished = len(first) < case.batch_count
    state = copy.deepcopy(loader.state_dict())
    generator = torch.get_rng_state()
    rest = values(loader if is_finished else iterator)
    torch.manual_seed(99)
    again = case.make(loader_class)
    again.load_state_dict(state)
    if case.source == "counter" or case.options["num_workers"] > 0:
        resumed = values(again)
    else:  # the trainer's generator is the dataset's
        torch.set_rng_state(generator)
        resumed = values(again)
    return [first, rest, resumed]


@pytest.mark.sampled(23)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_random_resumed_stream_matches_torchdata(seed: int) -> None:
    case = Case(seed)
    print(case)
    first, rest, resumed = streams(case, DataLoader)
    assert resumed == rest, "as it would have gone on"
    assert [first, rest, resumed] == streams(case, StatefulDataLoader)
