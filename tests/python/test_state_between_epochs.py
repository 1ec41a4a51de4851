# SPDX-License-Identifier: Apache-2.0
"""The epoch after a state saved at an epoch's end, or before its first batch.

A program that saved at the end of an epoch and was restarted got another next epoch: a dataset that
counts its epochs restarted at 0, one with a private generator gave other samples, and one that
keeps its place gave none at all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from penstock import DataLoader, MixtureSampler


class CountsEpochs(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        for place in range(7):
            yield 100 * self.epoch + place
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class KeepsPlace(IterableDataset[int]):
    """Counts its epochs too; its first pass after a load resumes where the state was taken."""

    def __init__(self) -> None:
        self.epoch = self.place = self.first = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        if first == 0:
            self.epoch += 1
        for self.place in range(first + 1, 8):
            yield 100 * self.epoch + self.place

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.first = self.place


class Rolls:
    """An iterator that keeps the global generator of torch in its state."""

    def __init__(self) -> None:
        self.left = 7

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]
        torch.set_rng_state(state["generator"])


class IteratesOverRolls(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return Rolls()


class OwnGenerator(Dataset[float]):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand((), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


DATASETS: list[Any] = [CountsEpochs, KeepsPlace, OwnGenerator, IteratesOverRolls]
WORKERS = [
    {"num_workers": 0},
    pytest.param({"num_workers": 3}, marks=pytest.mark.slow),
    pytest.param({"num_workers": 3, "persistent_workers": True}, marks=pytest.mark.slow),
]


def epoch_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("dataset_class", DATASETS)
@pytest.mark.parametrize("epoch_count", [1, 2])
def test_state_between_epochs_resumes_with_the_next_epoch(
    dataset_class: Any, workers: dict[str, Any], seeding: str, epoch_count: int
) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(3)  # of base seeds, which are not the dataset's
        options: dict[str, Any] = {"batch_size": 2, "seeding": seeding, **workers}
        return DataLoader(dataset_class(), generator=generator, **options)

    loader = make()
    for _ in range(epoch_count):
        epoch_of(loader)
    state = copy.deepcopy(loader.state_dict())
    expected = [epoch_of(loader), epoch_of(loader)]
    resumed = make()
    resumed.load_state_dict(state)
    assert [epoch_of(resumed), epoch_of(resumed)] == expected


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("dataset_class", DATASETS)
def test_state_before_first_batch_reloads_into_same_loader(
    dataset_class: Any, seeding: str
) -> None:
    loader = DataLoader(
        dataset_class(),
        batch_size=2,
        seeding=seeding,
        shuffle=dataset_class is OwnGenerator or None,
    )
    batches = iter(loader)
    state = copy.deepcopy(loader.state_dict())
    expected = [batch.tolist() for batch in batches]
    for _ in zip(range(2), loader, strict=False):
        pass
    loader.load_state_dict(state)
    assert epoch_of(loader) == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("epochs_before", [0, 1, 2])
@pytest.mark.parametrize("was_used", [False, True])
def test_state_before_first_batch_has_sampler_of_epoch_start(
    workers: int, epochs_before: int, was_used: bool
) -> None:
    def make() -> DataLoader[int]:
        sampler = MixtureSampler([20, 20], [0.5, 0.5], seed=1)
        return DataLoader(list(range(40)), 4, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]

    first = make()
    for _ in range(epochs_before):
        list(first)
    iterator = iter(first)
    state = first.state_dict()
    expected = [batch.tolist() for batch in iterator]
    second = make()
    if was_used:
        list(second)
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == expected
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in first]
