# SPDX-License-Identifier: Apache-2.0
"""A pool's job is pickled again if and only if any part of it has changed."""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, _DatasetKind, default_collate

from penstock.pool.job_pickle import PickleCache
from penstock.pool.pool_job import Job, job_id, pack_job
from penstock.worker.fetching import FetchSpec

SETTINGS = {"scale": 2}


class Sizes(dict[str, int]):
    unit = "mm"


class Rows(Dataset[Any]):
    """Records in a file, outside of what a look can see, how often it is pickled."""

    shift = 1

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.rows = torch.arange(12.0).reshape(4, 3)
        self.array = np.arange(6)
        self.names = [{"first": 1}, "second"]
        self.sizes = Sizes(width=3)
        self.generator = torch.Generator().manual_seed(2)

    def __getstate__(self) -> Any:
        with open(self.notes, "a") as file:
            file.write("x")
        return vars(self)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * SETTINGS["scale"] + self.shift


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "notes")


def pickle_count(rows: Rows) -> int:
    return os.path.getsize(rows.notes) if rows.notes.exists() else 0


def job_of(dataset: Any) -> Job:
    fetch = FetchSpec(_DatasetKind.Map, dataset, True, default_collate, False, 1)
    return Job(fetch, None, 1, False, "rows")


def test_unchanged_dataset_is_pickled_once(rows: Rows) -> None:
    """Each epoch of a large dataset started with a minute of pickling."""
    known = PickleCache()
    packed = pack_job(job_of(rows), [], known)
    assert [job_id(job_of(rows), [], known) for _ in range(3)] == [packed.id] * 3
    assert pickle_count(rows) == 1
    assert job_id(job_of(rows), []) == packed.id


def change_by_an_array(rows: Rows) -> None:
    rows.rows.numpy()[2, 1] = 70


def change_an_item(rows: Rows) -> None:
    rows.names[0]["first"] = 5  # type: ignore[index]


def change_an_attribute(rows: Rows) -> None:
    rows.extra = 1  # type: ignore[attr-defined]


def change_an_array(rows: Rows) -> None:
    rows.array[3] = 9


def draw(rows: Rows) -> None:
    torch.rand(1, generator=rows.generator)


@pytest.mark.parametrize(
    "change", [change_by_an_array, change_an_item, change_an_attribute, change_an_array, draw]
)
def test_changed_dataset_is_pickled_again(rows: Rows, change: Callable[[Rows], None]) -> None:
    known = PickleCache()
    first = pack_job(job_of(rows), [], known).id
    change(rows)
    second = job_id(job_of(rows), [], known)
    assert second != first
    assert second == job_id(job_of(rows), [])
    count = pickle_count(rows)
    assert job_id(job_of(rows), [], known) == second
    assert pickle_count(rows) == count, "it is known again"


def by_value(code: str) -> dict[str, Any]:
    """The names of a program, whose functions and classes are pickled by value."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(code, scope)
    return scope


PROGRAM = """
class Sizes(dict):
    unit = 1

class Squares:
    shift = 1
    sizes = Sizes(width=2)
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return factor[0] * index ** 2 + self.shift

factor = [3]
"""


@pytest.mark.parametrize(
    "change", ["factor[0] = 4", "Squares.shift = 2", "Squares.__len__ = len", "Sizes.unit = 2"]
)
def test_changed_program_code_is_pickled_again(change: str) -> None:
    scope = by_value(PROGRAM)
    known, dataset = PickleCache(), scope["Squares"]()
    first = pack_job(job_of(dataset), [], known).id
    assert job_id(job_of(dataset), [], known) == first
    exec(change, scope)
    assert job_id(job_of(dataset), [], known) == job_id(job_of(dataset), []) != first


def test_opaque_dataset_is_pickled_each_time(rows: Rows) -> None:
    rows.context = decimal.Context()  # type: ignore[attr-defined]  # of a type that is not Python's
    known = PickleCache()
    first = pack_job(job_of(rows), [], known).id
    assert [job_id(job_of(rows), [], known) for _ in range(2)] == [first] * 2
    assert pickle_count(rows) == 3
