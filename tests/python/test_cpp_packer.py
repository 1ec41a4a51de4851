# SPDX-License-Identifier: Apache-2.0
"""A packer in C++ makes the rows of Python's, and each continues from the other's state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from cpp_loader import as_numbers, error_of_cpp, run_cpp
from torch.utils.data import Dataset

from penstock import DataLoader, Packer

SIZE = 60
LISTS = {"batch_size": 7, "num_workers": 2, "shuffle": True, "generator": 5}
STREAMS = {"input_ids": 3, "mask": 1}


class Documents(Dataset[Any]):
    """The documents of `tests/cpp/api/draw_datasets.h`."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = (index * 37 + 11) % 45
        tokens = torch.arange(index * 100, index * 100 + length)
        return {"input_ids": tokens, "mask": tokens % 3 == 0}


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows of lists": (LISTS, {"row_length": 30, "too_long": "split", "padding": STREAMS}),
    "single documents": (
        {"batch_size": None, "num_workers": 2},
        {"row_length": 50, "open_bins": 5, "batch_size": 2, "padding": STREAMS},
    ),
    "next-fit": (
        LISTS,
        {"row_length": 30, "policy": "next_fit", "too_long": "drop", "padding": {"input_ids": 0}},
    ),
    "second rank": (
        LISTS,
        {"row_length": 64, "batch_size": 2, "remainder": "drop", "rank": 1, "world_size": 2},
    ),
}


def python_packer(options: dict[str, Any], packing: dict[str, Any]) -> Packer:
    options = {**options}
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    if options["batch_size"] is not None:
        options["collate_fn"] = list
    return Packer(DataLoader(Documents(), seeding="batch", **options), **packing)


def as_row(batch: dict[str, Any]) -> list[Any]:
    return [as_numbers(part) for part in batch.values()]


def as_counts(packer: Packer) -> list[int]:
    stats = packer.stats()
    return [getattr(stats, name) for name in type(stats).__slots__]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_rows_and_states_are_those_of_python(way: str) -> None:
    options, packing = WAYS[way]
    in_cpp = {"size": SIZE, "options": options, "pack": packing, "seed": 3}
    torch.manual_seed(3)
    packer = python_packer(options, packing)
    whole = [as_row(batch) for batch in packer]
    *rows, counts, _ = run_cpp(**in_cpp)
    assert rows == whole
    assert counts == as_counts(packer)
    lengths = np.array([len(Documents()[index]["input_ids"]) for index in range(SIZE)])
    if way == "single documents":
        assert packer.plan(lengths) == packer.stats()

    for stop in (1, len(whole) // 2, len(whole) - 1):
        torch.manual_seed(3)
        first = python_packer(options, packing)
        iterator = iter(first)
        assert [as_row(next(iterator)) for _ in range(stop)] == whole[:stop]
        *rows, counts, _ = run_cpp(**{**in_cpp, "seed": 8}, state=json.loads(first.state_json()))
        assert rows == whole[stop:]
        assert counts == as_counts(packer)

        *rows, _, state = run_cpp(**in_cpp, stop=stop)
        assert rows == whole[:stop]
        torch.manual_seed(8)
        last = python_packer(options, packing)
        last.load_state_dict(state)
        assert [as_row(batch) for batch in last] == whole[stop:]


def test_state_without_a_loader_reads_the_documents_again() -> None:
    options, packing = {"batch_size": 7}, {"row_length": 45, "padding": STREAMS}
    in_cpp = {"size": SIZE, "options": options, "pack": packing, "seed": 3, "is_stateless": True}
    *whole, counts, _ = run_cpp(**in_cpp)
    *rows, _, state = run_cpp(**in_cpp, stop=4)
    *rest, counts_of_rest, _ = run_cpp(**in_cpp, state=state)
    assert rows + rest == whole
    assert counts_of_rest == counts
    documents = [Documents()[index] for index in range(SIZE)]
    lists = [documents[first : first + 7] for first in range(0, SIZE, 7)]
    packer = Packer(lists, 45, padding=STREAMS)
    packer.load_state_dict(state)
    assert [as_row(batch) for batch in packer] == rest
    other = {**in_cpp, "size": SIZE - 40}
    assert "documents must be as before the state" in error_of_cpp(**other, state=state)


def test_invalid_input_is_reported() -> None:
    in_cpp: dict[str, Any] = {"size": SIZE, "options": {"batch_size": None}, "seed": 3}
    for packing, message in [
        ({"row_length": 0}, "row_length must be >= 1, got 0"),
        ({"row_length": 9, "open_bins": 0}, "open_bins must be >= 1, got 0"),
        ({"row_length": 20}, "a document must have at most row_length=20 tokens, got 40"),
        ({"row_length": 90, "padding": {"labels": 0}}, "every document must have the streams"),
        ({"row_length": 90, "padding": {"positions": 0}}, "streams must not be named"),
    ]:
        assert message in error_of_cpp(**in_cpp, pack=packing)

    packing = {"row_length": 45, "padding": STREAMS}
    *_, state = run_cpp(**in_cpp, pack=packing, stop=3)
    for change, message in [
        ({"version": 2}, "of version 1"),
        ({"source": None}, "the state must contain a state of the documents"),
        ({"options": {**state["options"], "row_length": 44}}, "row_length must be the state's, 44"),
        ({"pass": {**state["pass"], "bins": [[[0, 0, 45]]]}}, "open bins must have room"),
        ({"pass": {**state["pass"], "held": []}}, "must be a complete result of state()"),
        ({"pass": {**state["pass"], "streams": {}}}, "documents without streams"),
    ]:
        error = error_of_cpp(**in_cpp, pack=packing, state={**state, **change})
        assert message in error, change
