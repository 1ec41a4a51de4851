# SPDX-License-Identifier: Apache-2.0
"""Datasets whose state holds the global generators: what a program resumes with is what it would
have gone on with.

A program was interrupted in the middle of an epoch and resumed in a new process. It got samples
twice and others never, since the dataset's state, which sets torch's generator, was given back
before the sampler drew its order from that generator.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import DataLoader

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
    """The state after so many batches, and what the uninterrupted program gets after it."""
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
def test_a_resumed_program_gets_the_rest(
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


def test_with_seeding_by_batch_no_sample_comes_twice() -> None:
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seeding": "batch"}
    torch.manual_seed(7)
    state, rest = rest_after(DataLoader(Drawing(), **options), 3)
    torch.manual_seed(99)
    resumed = DataLoader(Drawing(), **options)
    resumed.load_state_dict(state)
    assert [as_plain(batch) for batch in resumed] == rest
