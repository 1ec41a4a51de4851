# SPDX-License-Identifier: Apache-2.0
"""Filters in C++ and in Python select the same samples, read each other's cache files, and resume
from each other's states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_loader import Draws, as_numbers, error_of_cpp, run_cpp

import penstock

SIZE = 110
OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "generator": 9}


def is_kept(sample: Any) -> bool:
    """Return what loader_main.cpp's predicate returns."""
    return bool(sample[0] % 3 != 0)


def python_loader(**filtering: Any) -> Any:
    kept = penstock.filtered(Draws(SIZE), is_kept, **filtering)
    options = {**OPTIONS, "generator": torch.Generator().manual_seed(OPTIONS["generator"])}
    return penstock.DataLoader(kept, seeding="batch", **options)


def cpp_batches(**given: Any) -> list[Any]:
    options = {**OPTIONS, "num_workers": given.pop("num_workers", 0)}
    return run_cpp(size=SIZE, options=options, seed=3, **{"filter": {}, **given})


@pytest.mark.parametrize("workers", [0, 2])
def test_filtered_batches_and_states_are_those_of_python(workers: int) -> None:
    loader = python_loader()
    whole = [as_numbers(batch) for _ in range(2) for batch in loader]
    filtering = {"filter": {"num_workers": workers}, "num_workers": workers}
    assert cpp_batches(epochs=2, **filtering) == whole
    *first, state = cpp_batches(stop=3, **filtering)
    assert first == whole[:3]
    resumed = python_loader()
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    assert [as_numbers(next(iterator)) for _ in range(2)] == whole[3:5]
    state = json.loads(json.dumps(resumed.state_dict()))
    assert cpp_batches(state=state, **filtering) == whole[5 : len(whole) // 2]


def test_state_of_another_selection_is_refused_across_languages() -> None:
    loader = python_loader()
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["built"]["selection"] = "0" * 16
    text = error_of_cpp(size=SIZE, options=OPTIONS, seed=3, filter={}, state=state)
    assert "is of a loader with selection '0000000000000000' and this one has selection '" in text
    *_, state = cpp_batches(stop=1)
    kept = torch.utils.data.Subset(Draws(SIZE), [i for i in range(SIZE) if is_kept((i,))])
    generator = torch.Generator()
    options = {**OPTIONS, "generator": generator}
    plain = penstock.DataLoader(kept, seeding="batch", **options)
    with pytest.raises(ValueError, match="and this one has selection None"):
        plain.load_state_dict(state)


def test_cache_files_are_the_same(tmp_path: Path) -> None:
    of_python, of_cpp = tmp_path / "python.idx", tmp_path / "cpp.idx"
    expected = [as_numbers(batch) for batch in python_loader(cache=of_python)]
    assert cpp_batches(filter={"cache": str(of_cpp)}) == expected
    head, _, bits = of_cpp.read_bytes().partition(b"\n")
    other_head, _, other_bits = of_python.read_bytes().partition(b"\n")
    assert (json.loads(head), bits) == (json.loads(other_head), other_bits)
    assert cpp_batches(filter={"cache": str(of_python)}) == expected
    assert [as_numbers(batch) for batch in python_loader(cache=of_cpp)] == expected
    bad = bytes([other_bits[0] ^ 0x80]) + other_bits[1:]
    of_python.write_bytes(other_head + b"\n" + bad)
    options = {"options": OPTIONS, "seed": 3, "size": SIZE}
    text = error_of_cpp(filter={"cache": str(of_python)}, **options)
    assert "another or a damaged one in" in text
