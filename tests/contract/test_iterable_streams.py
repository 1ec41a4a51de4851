# SPDX-License-Identifier: Apache-2.0
"""Iterable datasets: the same batches in the same order, regardless of which worker ends first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sample_datasets import Streamed, as_is, own_share, worker_id
from stream_oracle import Recorder, Scenario, assert_same_stream, whole_epochs
from torch.utils.data import ChainDataset, IterableDataset


class Counting(IterableDataset[Any]):
    """Reports how often this copy of it was iterated: persistent workers keep their copy."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        self.epoch += 1
        for index in range(4):
            yield (self.epoch, worker_id(), index)


def uneven_shares() -> list[tuple[int, int]]:
    """The first worker has no sample, the second two samples, the third seven."""
    return [(worker_id(), index) for index in range({-1: 5, 0: 0, 1: 2, 2: 7}[worker_id()])]


def first_has_most() -> list[tuple[int, int]]:
    return [(worker_id(), index) for index in range({-1: 5, 0: 9, 1: 1, 2: 3}[worker_id()])]


def draws() -> Iterator[tuple[int, torch.Tensor, float, float]]:
    for index in range(6):
        yield (index, torch.rand(2), random.random(), float(np.random.rand()))


def fails_in_the_middle() -> Iterator[int]:
    yield from range(4)
    raise ValueError("the record is damaged")


def cannot_start() -> Iterator[int]:
    raise OSError("the file is missing")


def stops_itself(samples: list[Any]) -> Any:
    if samples[0] == 4:
        raise StopIteration
    return samples


SHARES = [
    Scenario(
        f"{name}, {workers} workers, batches of {batch_size}, drop_last {drop_last}",
        partial(Streamed, function),
        {"num_workers": workers, "batch_size": batch_size, "drop_last": drop_last},
    )
    for workers in (0, 1, 2, 3)
    for name, function in (
        ("each worker reads all", partial(range, 7)),
        ("each worker reads its share", partial(own_share, 11)),
        ("the first workers end early", uneven_shares),
        ("the last workers end early", first_has_most),
    )
    for batch_size, drop_last in ((1, False), (3, False), (3, True), (None, False))
    if workers in (0, 3) or batch_size == 3
]

KINDS = (
    [
        Scenario(
            f"random draws, {workers} workers, persistent {persistent}",
            partial(Streamed, draws),
            {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent},
            whole_epochs(2),
        )
        for workers, persistent in ((0, False), (2, False), (2, True))
    ]
    + [
        Scenario(
            f"iter() of the dataset once an epoch, {workers} workers, persistent {persistent}",
            Counting,
            {"batch_size": 3, "num_workers": workers, "persistent_workers": persistent},
            whole_epochs(3),
        )
        for workers, persistent in ((0, False), (2, False), (2, True))
    ]
    + [
        Scenario(
            f"{name}, {workers} workers",
            partial(Streamed, function),
            {"batch_size": 2, "num_workers": workers, **options},
        )
        for workers in (0, 2)
        for name, function, options in (
            ("raises in the middle", fails_in_the_middle, {}),
            ("raises in iter()", cannot_start, {}),
            ("is empty", list, {}),
            ("collate_fn raises StopIteration", partial(range, 9), {"collate_fn": stops_itself}),
            ("is a list", partial(list, "abcde"), {}),
            ("prefetch 5", partial(own_share, 30), {"prefetch_factor": 5} if workers else {}),
            ("in order False", partial(own_share, 9), {"in_order": False} if workers < 2 else {}),
        )
    ]
    + [
        Scenario(
            "chained datasets",
            lambda: ChainDataset([Streamed(partial(own_share, 5)), Streamed(partial(range, 2))]),
            {"batch_size": 2, "num_workers": 2},
        ),
        Scenario(
            "collates objects",
            partial(Streamed, lambda: iter(["a", None, 3])),
            {"batch_size": 2, "num_workers": 1, "collate_fn": as_is},
        ),
    ]
)


def measured_epochs(loader: Any, recorder: Recorder) -> None:
    """len() first: only then does the loader compare its batches with the promised length."""
    recorder.note("length", len(loader))
    whole_epochs(2)(loader, recorder)


LENGTHS = [
    Scenario(
        f"len {length} of {count}, {workers} workers, batches of {batch_size}, {drive.__name__}",
        partial(Streamed, partial(range, count), length),
        {"batch_size": batch_size, "num_workers": workers},
        drive,
    )
    for drive in (measured_epochs, whole_epochs(1))
    for workers in (0, 2)
    for length, count, batch_size in ((3, 5, 1), (5, 5, 1), (9, 5, 2), (2, 9, 4), (3, 5, None))
]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("scenario", SHARES + KINDS + LENGTHS, ids=lambda scenario: scenario.name)
def test_iterable_stream_matches_torch(loader_class: type, scenario: Scenario) -> None:
    assert_same_stream(loader_class, scenario)


def test_exhausted_iterator_stays_exhausted(loader_class: type) -> None:
    iterator = iter(loader_class(Streamed(partial(range, 3)), num_workers=2))
    assert len(list(iterator)) == 6
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_infinite_dataset_yields_its_first_batches(loader_class: type) -> None:
    def endless() -> Iterator[int]:
        index = 0
        while True:
            yield index
            index += 1

    iterator = iter(loader_class(Streamed(endless), batch_size=2, num_workers=2))
    assert [next(iterator).tolist() for _ in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
