# SPDX-License-Identifier: Apache-2.0
"""An exception of the dataset names the sample: the traceback has the line, not the index."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from penstock import DataLoader
from penstock.pool.worker_errors import describe_error
from penstock.worker.map_fetchers import format_sample

needs_notes = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="an exception carries notes from Python 3.11 on"
)


class Fails(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise LookupError(f"no {index}")
        return index


def fails_to_collate(samples: list[int]) -> Any:
    raise LookupError("no batch")


def text_of(loader: Any) -> str:
    with pytest.raises(LookupError) as caught:
        list(loader)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("fetch_threads", [1, 3])
@pytest.mark.parametrize(
    "num_workers", [pytest.param(0, marks=needs_notes), pytest.param(2, marks=pytest.mark.slow)]
)
def test_error_names_the_sample(num_workers: int, fetch_threads: int) -> None:
    loader = DataLoader(Fails(), batch_size=4, num_workers=num_workers, fetch_threads=fetch_threads)
    assert "sample 7 of the dataset" in text_of(loader)


@needs_notes
def test_error_names_the_index_within_a_subset() -> None:
    text = text_of(DataLoader(Subset(Fails(), [3, 7]), batch_size=2))
    assert "sample 1 of the dataset" in text


@pytest.mark.slow
def test_worker_error_keeps_the_first_and_last_lines_of_torch() -> None:
    loader = DataLoader(Fails(), batch_size=4, num_workers=1)
    with pytest.raises(LookupError) as caught:
        list(loader)
    lines = str(caught.value).splitlines()
    assert lines[0] == "Caught LookupError in DataLoader worker process 0."
    assert lines[1] == "Original Traceback (most recent call last):"
    assert lines[2] == "  (sample 7 of the dataset)"
    assert lines[-1] == "LookupError: no 7"


@pytest.mark.slow
def test_collate_error_names_no_sample() -> None:
    loader = DataLoader(Fails(), batch_size=2, num_workers=1, collate_fn=fails_to_collate)
    assert "of the dataset" not in text_of(loader)


def test_pool_worker_error_names_the_sample() -> None:
    with pytest.raises(LookupError) as caught:
        list(DataLoader(Fails(), batch_size=4))
    name, text = describe_error(caught.value)
    assert name == "LookupError"
    assert "\n  (sample 7 of the dataset)\n" in text


def test_first_and_last_samples_of_a_batch_are_named() -> None:
    for indices in ([7], [7, 1], [1, 7]):
        with pytest.raises(LookupError) as caught:
            list(DataLoader(Fails(), batch_sampler=[indices]))
        assert format_sample(caught.value) == "sample 7 of the dataset"


def test_non_list_batch_of_indices_names_no_sample() -> None:
    with pytest.raises(LookupError) as caught:
        list(DataLoader(Fails(), batch_sampler=[(1, 7)]))
    assert format_sample(caught.value) == ""


def test_tensor_index_is_named() -> None:
    indices = [[torch.tensor(7)]]
    loader = DataLoader(Fails(), batch_sampler=indices)
    if sys.version_info >= (3, 11):
        assert "sample tensor(7) of the dataset" in text_of(loader)


@dataclass(frozen=True)
class BadRecord(Exception):
    place: str


class Sealed(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"{name} is written to a sealed exception")


class Slotted(Exception):
    __slots__ = ("place",)


@dataclass
class Unhashable(Exception):
    place: str


@dataclass
class Raises(Dataset[int]):
    error: Exception

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise self.error
        return index


# Made in each test: a kept exception keeps the frames that it passed through.
REFUSING = [BadRecord, Sealed, Slotted, Unhashable]


@pytest.mark.parametrize("fetch_threads", [1, 3])
@pytest.mark.parametrize("kind", REFUSING)
def test_unwritable_exception_is_raised_unchanged(kind: Any, fetch_threads: int) -> None:
    error = kind("here")
    loader = DataLoader(Raises(error), batch_size=4, fetch_threads=fetch_threads)
    with pytest.raises(kind) as caught:
        list(loader)
    assert caught.value is error
    assert set(vars(error)) <= {"place", "__notes__"}
    assert format_sample(caught.value) == "sample 7 of the dataset"


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSING)
def test_unwritable_worker_exception_keeps_its_type_and_sample(
    kind: Any,
) -> None:
    loader = DataLoader(Raises(kind("here")), batch_size=4, num_workers=1)
    with pytest.raises(kind) as caught:
        list(loader)
    assert "\n  (sample 7 of the dataset)\n" in str(caught.value.args[0])


def rebuild() -> Any:
    try:
        raise KeyError("the cause")
    except KeyError:
        raise BadRecord("here") from None


class CannotBeRead:
    def __reduce__(self) -> Any:
        return rebuild, ()


@pytest.mark.slow
def test_exception_found_by_lookahead_is_raised_by_next() -> None:
    loader = DataLoader(range(4), collate_fn=lambda samples: CannotBeRead(), num_workers=1)
    iterator: Any = iter(loader)
    assert iterator.lookahead(1, select=id) == []
    with pytest.raises(BadRecord):
        next(iterator)


def again(error: Exception) -> Any:
    def collate(samples: list[Any]) -> Any:
        raise error

    return collate


def test_reraised_exception_names_only_the_current_sample() -> None:
    error = BadRecord("here")
    for indices, sample in ([1, 7], "sample 7 of the dataset"), ([1, 2], ""):
        with pytest.raises(BadRecord) as caught:
            list(DataLoader(Raises(error), batch_sampler=[indices], collate_fn=again(error)))
        assert format_sample(caught.value) == sample
