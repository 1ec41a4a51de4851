# SPDX-License-Identifier: Apache-2.0
"""The numbering of a batch's tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from in_process_pool import InProcessPool

from penstock import offload
from penstock.tracking.leaves import flatten_batch, replace_leaves

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    image: Any
    label: Any


def test_leaves_are_in_nesting_order() -> None:
    a, b, c, d, e, f = (torch.tensor(float(k)) for k in range(6))
    batch = {"z": [a, (b, "text", None)], "a": Pair(c, 3), "m": OrderedDict(y=d), "r": Record(e, f)}
    assert [id(leaf) for leaf in flatten_batch(batch)] == [id(t) for t in (a, b, c, d, e, f)]


def test_repeated_tensor_counts_at_its_first_position() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    assert [id(leaf) for leaf in flatten_batch([a, b, {"again": a}, (b,)])] == [id(a), id(b)]


def test_batch_without_tensors_has_no_leaves() -> None:
    assert flatten_batch({"n": 1, "s": "x", "o": object(), "t": Record}) == []


class ReadOnly(UserDict[str, Any]):
    """Filled once, like a locked TensorDict."""

    is_locked = False

    def __setitem__(self, key: str, value: Any) -> None:
        if self.is_locked:
            raise RuntimeError("the batch is locked")
        super().__setitem__(key, value)


class Notifies(dict[str, Any]):
    writes = 0

    def __setitem__(self, key: str, value: Any) -> None:
        type(self).writes += 1
        super().__setitem__(key, value)


@dataclass
class Checked:
    image: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise LookupError("fields are set once")
        object.__setattr__(self, name, value)


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict, lambda x: Record(**x)])
def test_leaves_of_common_containers_are_replaced(make: Callable[[Any], Any]) -> None:
    old, new, label = torch.zeros(2), torch.ones(2), torch.zeros(1)
    batch = replace_leaves([make({"image": old, "label": label})], {id(old): new})
    assert [id(leaf) for leaf in flatten_batch(batch)] == [id(new), id(label)]


def test_replacement_creates_no_defaultdict_entries() -> None:
    old, new = torch.zeros(2), torch.ones(2)
    batch = defaultdict(list, {"x": old})
    assert replace_leaves(batch, {id(old): new})["x"] is new
    assert list(batch) == ["x"]


@pytest.mark.parametrize("kind", [ReadOnly, Notifies, Checked])
def test_containers_with_custom_writes_are_not_modified(kind: Any) -> None:
    old = torch.zeros(2)
    batch = kind(image=old)
    batch.__dict__["is_locked"] = True
    Notifies.writes = 0
    assert replace_leaves(batch, {id(old): torch.ones(2)}) is batch
    assert flatten_batch(batch)[0] is old
    assert Notifies.writes == 0


def test_training_with_a_locked_batch_matches_the_reference() -> None:
    """Training ended at the third batch, in the loader: "the batch is locked"."""

    class Locked(InProcessPool):
        def deliver(self, batch: Any) -> Any:
            locked = ReadOnly(image=batch.clone())
            locked.is_locked = True
            return super().deliver(locked)

    pool = Locked(
        [torch.randn(4, 20, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    )
    reference = torch.nn.Linear(20, 2)
    model = torch.nn.Linear(20, 2)
    model.load_state_dict(reference.state_dict())
    model = offload(model, pool, cut="maximal")
    for raw, batch in zip(pool.batches, pool, strict=True):
        ours, theirs = model(batch["image"] * 2.0 - 1.0), reference(raw * 2.0 - 1.0)
        assert torch.equal(ours, theirs)
