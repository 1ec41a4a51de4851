# SPDX-License-Identifier: Apache-2.0
"""Datasets whose state holds the global generators: a resumed program draws the same numbers as an
uninterrupted one.

A program was interrupted in the middle of an epoch and resumed in a new process. It got some
samples twice and others never, since the dataset's state, which sets torch's generator, was
restored before the sampler drew its order from that generator.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import DataLoader
from penstock.stream.batch_seeds import generator_states, have_moved, restore

COUNT = 30
BATCH_SIZE = 2


class _HoldsGenerator:
    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


class Drawing(_HoldsGenerator, Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


class Streaming(_HoldsGenerator, IterableDataset[tuple[int, float]]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        while self.place < COUNT:
            self.place += 1
            yield self.place, float(torch.rand(()))
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.place = state["place"]


def rest_after(loader: Any, batch_count: int) -> tuple[dict[str, Any], list[Any]]:
    """The state after so many batches, and the batches of the uninterrupted program after it."""
    batches = iter(loader)
    for _ in range(batch_count):
        next(batches)
        torch.rand(1)  # as dropout would
    state = copy.deepcopy(loader.state_dict())
    return state, [as_plain(batch) for batch in batches]


def as_plain(batch: Any) -> Any:
    return [part.tolist() for part in batch]


@pytest.mark.parametrize("loader_class", [StatefulDataLoader, DataLoader])
@pytest.mark.parametrize("batch_count", [0, 1, 10])
@pytest.mark.parametrize(
    ("dataset_class", "options"),
    [
        (Drawing, {}),
        (Drawing, {"shuffle": True}),
        (Streaming, {}),
    ],
)
def test_state_with_global_generator_resumes_exactly(
    loader_class: Any, batch_count: int, dataset_class: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(7)
    state, rest = rest_after(
        loader_class(dataset_class(), batch_size=BATCH_SIZE, **options), batch_count
    )
    torch.manual_seed(99)  # another process
    resumed = loader_class(dataset_class(), batch_size=BATCH_SIZE, **options)
    resumed.load_state_dict(state)
    assert [as_plain(batch) for batch in resumed] == rest


def test_batch_seeding_resumes_without_repeats() -> None:
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seeding": "batch"}
    torch.manual_seed(7)
    state, rest = rest_after(DataLoader(Drawing(), **options), 3)
    torch.manual_seed(99)
    resumed = DataLoader(Drawing(), **options)
    resumed.load_state_dict(state)
    assert [as_plain(batch) for batch in resumed] == rest


BIT_GENERATORS = [
    np.random.MT19937,
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.Philox,
    np.random.SFC64,
]


@pytest.fixture(params=BIT_GENERATORS, ids=lambda kind: kind.__name__)
def bit_generator(request: pytest.FixtureRequest) -> Iterator[None]:
    """The generator used by numpy.random's functions is another one."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(3))
    yield
    np.random.set_bit_generator(before)


class NumpyDrawing(Dataset[float]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + np.random.random()


class NumpyOrder:
    """A sampler that draws its order from numpy."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        yield from np.random.permutation(12).tolist()


@pytest.mark.usefixtures("bit_generator")
def test_numpy_draws_are_detected_and_restored() -> None:
    np.random.standard_normal()  # of two that are made concurrently, by the legacy functions
    states = generator_states()
    for draw in (np.random.standard_normal, np.random.random, lambda: np.random.randint(7)):
        assert not have_moved(states)
        first = draw()
        assert have_moved(states)
        restore(states)
        assert draw() == first
        restore(states)


@pytest.mark.usefixtures("bit_generator")
@pytest.mark.parametrize("seeding", ["worker", "batch", "sample"])
def test_state_resumes_with_any_numpy_generator(seeding: Any) -> None:
    def loader() -> Any:
        return DataLoader(range(12), batch_size=2, sampler=NumpyOrder(), seeding=seeding)

    first = loader()
    batches = iter(first)
    next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    expected = [batch.tolist() for batch in batches]
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("bit_generator")
def test_batch_seeding_of_numpy_is_independent_of_workers() -> None:
    def drawn(num_workers: int) -> list[float]:
        torch.manual_seed(3)
        context = "fork" if num_workers else None
        loader = DataLoader(
            NumpyDrawing(),
            seeding="batch",
            num_workers=num_workers,
            multiprocessing_context=context,
        )
        return [float(batch) for batch in loader]

    assert drawn(0) == drawn(1)


@pytest.mark.slow
@pytest.mark.usefixtures("bit_generator")
def test_dropped_prefetch_restores_any_numpy_generator() -> None:
    """The user saw a KeyError: 'pos' from load_state_dict()."""
    loader = DataLoader(range(12), sampler=NumpyOrder(), num_workers=1)
    state = loader.state_dict()
    for drop in (lambda: loader.load_state_dict(state), lambda: pickle.dumps(loader)):
        before = generator_states()
        loader.start_prefetch()
        drop()
        assert not have_moved(before)
