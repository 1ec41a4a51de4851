# SPDX-License-Identifier: Apache-2.0
"""A C++ loop and a Python loop see one stream, and each resumes from the other's state."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cpp_loader import Draws, DrawStream, as_numbers, run_cpp
from torch.utils.data import DistributedSampler

import penstock

SIZE = 22


def python_loader(iterable: bool = False, **options: Any) -> Any:
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    rank = options.pop("rank", None)
    dataset = DrawStream(SIZE) if iterable else Draws(SIZE)
    if rank is not None:
        options["sampler"] = DistributedSampler(dataset, 2, rank, seed=7)
    return penstock.DataLoader(dataset, seeding="batch", **options)


def python_batches(loader: Any, epochs: int = 1) -> list[Any]:
    return [as_numbers(batch) for _ in range(epochs) for batch in loader]


ORDERS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": 4, "shuffle": True, "drop_last": True},
    {"batch_size": 4, "shuffle": True, "generator": 9},
    {"batch_size": 2, "rank": 1},
    {"batch_size": None, "shuffle": True},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_cpp_loader_yields_the_batches_of_the_python_loader(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = python_batches(python_loader(**options), epochs=2)
    for workers in (0, 3):
        given = {**options, "num_workers": workers}
        assert run_cpp(size=SIZE, options=given, seed=3, epochs=2) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards", [1, 3])
def test_sharded_stream_is_the_same_in_cpp(shards: int) -> None:
    torch.manual_seed(3)
    options = {"batch_size": 4, "shards": shards}
    expected = python_batches(python_loader(iterable=True, **options), epochs=2)
    for workers in (0, 2):
        given = {**options, "num_workers": workers}
        assert run_cpp(size=SIZE, options=given, seed=3, epochs=2, iterable=True) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "iterable"), [*((order, False) for order in ORDERS), ({"shards": 3}, True)], ids=str
)
@pytest.mark.parametrize("stop", [2, 4])
def test_cpp_and_python_resume_from_each_others_state(
    options: dict[str, Any], iterable: bool, stop: int
) -> None:
    torch.manual_seed(3)
    whole = python_batches(python_loader(iterable, **options))

    torch.manual_seed(3)
    of_python = python_loader(iterable, num_workers=2, **options)
    iterator = iter(of_python)
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(of_python.state_dict()))
    in_cpp = {"size": SIZE, "options": {**options, "num_workers": 2}, "iterable": iterable}
    assert run_cpp(**in_cpp, seed=8, state=state) == whole[stop:]

    *begun, state = run_cpp(**in_cpp, seed=3, stop=stop)
    assert begun == whole[:stop]
    torch.manual_seed(8)
    of_python = python_loader(iterable, **options)
    of_python.load_state_dict(state)
    assert python_batches(of_python) == whole[stop:]


def test_state_moves_from_python_to_cpp_and_back() -> None:
    options = {"batch_size": 2, "shuffle": True}
    torch.manual_seed(3)
    whole = python_batches(python_loader(**options))
    torch.manual_seed(3)
    first = python_loader(**options)
    next(iter(first))
    in_cpp = {"size": SIZE, "options": options, "seed": 4, "state": first.state_dict()}
    *middle, state = run_cpp(**in_cpp, stop=3)
    assert middle == whole[1:4]
    assert state["generators"] == first.state_dict()["generators"]
    last = python_loader(**options)
    last.load_state_dict(state)
    assert python_batches(last) == whole[4:]


@pytest.mark.long
def test_state_of_another_stream_is_rejected_with_the_same_message() -> None:
    loader = python_loader(batch_size=5)
    state = run_cpp(size=SIZE, options={"batch_size": 4}, seed=3, stop=1)[-1]
    with pytest.raises(ValueError, match="is of a loader with batch_size 4 and this one has"):
        loader.load_state_dict(state)
    with pytest.raises(AssertionError, match="is of a loader with batch_size 5 and this one has"):
        run_cpp(size=SIZE, options={"batch_size": 4}, seed=3, state=loader.state_dict())
