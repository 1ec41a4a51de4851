# SPDX-License-Identifier: Apache-2.0
"""SharedList against the list that it is made of, alone and as an attribute of a dataset."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import process_traces
import pytest
import torch
from sample_datasets import as_is
from stream_oracle import Scenario, describe, error_of, record, without_frames
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from penstock import DataLoader, SharedList

ITEMS: list[Any] = [
    ("cat.jpg", 0),
    {"boxes": [(1, 2.5), (3, float("nan"))], "name": None},
    "",
    b"\x00" * 70_000,
    np.arange(6, dtype=">i2").reshape(2, 3),
    torch.arange(4.0).view(2, 2),
    Path("a/b"),
    float("-0"),
]


def test_items_are_equal_to_the_original_ones() -> None:
    shared = SharedList(ITEMS)
    assert len(shared) == len(ITEMS)
    assert describe(list(shared)) == describe(ITEMS)
    for index in (*range(-len(ITEMS), len(ITEMS)), True, np.int64(3), torch.tensor(-2)):
        assert describe(shared[index]) == describe(ITEMS[index])


SLICES = [
    slice(None),
    slice(2, 5),
    slice(-3, None),
    slice(None, None, -1),
    slice(6, 1, -2),
    slice(4, 2),
    slice(-100, 100, 3),
]


@pytest.mark.parametrize("part", SLICES, ids=repr)
@pytest.mark.parametrize("second", SLICES[:4], ids=repr)
def test_slice_shares_memory_with_its_list(part: slice, second: slice) -> None:
    items = list(range(100, 108))
    before = len(process_traces.descriptors())
    shared = SharedList(items)
    assert list(shared[part]) == items[part]
    cut = shared[part][second]
    assert isinstance(cut, SharedList)
    assert (list(cut), len(cut)) == (items[part][second], len(items[part][second]))
    assert len(process_traces.descriptors()) <= before + 2


def test_index_count_and_reversed_match_list() -> None:
    items = [3, 1, 3, 2]
    shared = SharedList(items)
    assert (3 in shared, 5 in shared) == (True, False)
    assert (shared.index(3, 1), shared.count(3)) == (2, 2)
    assert list(reversed(shared)) == items[::-1]


@pytest.mark.parametrize("index", [8, -9, 10**30, "a", 1.0, None, (1, 2)], ids=repr)
def test_invalid_index_raises_as_list_does(index: Any) -> None:
    items, shared = list(range(8)), SharedList(range(8))
    theirs, ours = (error_of(partial(sequence.__getitem__, index)) for sequence in (items, shared))
    assert type(ours) is type(theirs)
    if index != 10**30:
        assert str(ours) == str(theirs)


def test_items_cannot_be_assigned_or_deleted() -> None:
    shared: Any = SharedList([[1]])
    with pytest.raises(TypeError, match="'SharedList' object does not support item assignment"):
        shared[0] = 2
    with pytest.raises(TypeError, match="'SharedList' object doesn't support item deletion"):
        del shared[0]
    shared[0].append(2)
    assert shared[0] == [1]


def test_unpicklable_item_error_names_its_index() -> None:
    before = process_traces.descriptors()
    error = without_frames(error_of(lambda: SharedList([1, 2, lambda: 3])))
    assert type(error) is TypeError
    assert str(error).startswith("item 2, a function, cannot be pickled: ")
    assert process_traces.descriptors() == before


def test_error_of_the_source_iterable_propagates() -> None:
    before = process_traces.descriptors()
    error = without_frames(error_of(lambda: SharedList(1 // count for count in (1, 0))))
    assert type(error) is ZeroDivisionError
    assert process_traces.descriptors() == before


def test_empty_and_generator_inputs_are_accepted() -> None:
    assert list(SharedList()) == list(SharedList([])[1:]) == []
    assert list(SharedList(str(count) for count in range(3))) == ["0", "1", "2"]


def test_copies_are_the_same_list_and_pickles_hold_items() -> None:
    shared = SharedList(range(10))
    assert copy.copy(shared) is copy.deepcopy({"list": shared})["list"] is shared
    restored = pickle.loads(pickle.dumps(shared[2:4]))
    assert type(restored) is SharedList
    assert list(restored) == [2, 3]


def test_memory_is_freed_with_the_last_list_or_slice() -> None:
    before = process_traces.take()
    shared = SharedList(range(1000))
    part = shared[5:7]
    del shared
    assert list(part) == [5, 6]
    del part
    gc.collect()
    assert process_traces.take().since(before) == {}


class Holds(Dataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.part = samples[5:]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        name, label = self.samples[index]
        return (name, label, self.part[-1], os.path.basename(name))


def samples(count: int) -> list[tuple[str, int]]:
    return [(f"photographs/{index:09d}.jpg", index % 1000) for index in range(count)]


def holding(make: Callable[[Any], Any]) -> Holds:
    return Holds(make(samples(20)))


@pytest.mark.long("DataLoader0-forkserver", "DataLoader1-forkserver", "DataLoader1-spawn")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("loader_class", [TorchDataLoader, DataLoader])
def test_stream_of_shared_list_matches_list(loader_class: type, method: str) -> None:
    options = {
        "batch_size": 3,
        "shuffle": True,
        "num_workers": 2,
        "multiprocessing_context": method,
    }
    of_list = record(TorchDataLoader, Scenario("list", partial(holding, list), options))
    assert (
        record(loader_class, Scenario("shared", partial(holding, SharedList), options)) == of_list
    )


def private_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (line,) = (line for line in rollup.splitlines() if line.startswith("Private_Dirty:"))
    return int(line.split()[1]) * 1024


class Lengths(Holds):
    def __getitem__(self, index: int) -> int:
        return len(self.samples[index][0])


def bytes_after_an_epoch(dataset: Dataset[Any]) -> int:
    """The private memory of a worker after it has read every sample."""
    loader = DataLoader(
        dataset,
        batch_size=1000,
        num_workers=1,
        collate_fn=as_is,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    assert sum(map(len, iterator)) == len(dataset)  # type: ignore[arg-type]
    return private_bytes(iterator._workers[0].pid)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_worker_reading_all_items_makes_no_copy() -> None:
    """A plain list of this length is 50 MB, and the worker ends up with all of it."""
    plain = samples(300_000)
    shared = SharedList(plain)
    of_shared = bytes_after_an_epoch(Lengths(shared))
    of_plain = bytes_after_an_epoch(Lengths(plain))
    assert of_plain - of_shared > 20 << 20, f"{of_plain} with a list, {of_shared} with a SharedList"
