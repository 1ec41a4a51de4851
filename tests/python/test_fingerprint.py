# SPDX-License-Identifier: Apache-2.0
"""A fingerprint changes with what it is of, and is none where it could not."""

from __future__ import annotations

import functools
import multiprocessing
import random
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torchvision import transforms
from torchvision.datasets import FakeData

from penstock import SharedList
from penstock.worker.fingerprint import fingerprint

# multiprocessing keeps their memory for good.
VALUE = multiprocessing.Value("i")
RAW_ARRAY = multiprocessing.RawArray("d", 2)

counter = 0
table = {"seen": 0}


class Bare:
    pass


class Slotted:
    __slots__ = ("__hidden", "number")

    def __init__(self) -> None:
        self.number = 1
        self.__hidden = 2

    def hide(self, value: int) -> None:
        self.__hidden = value


class ReadsGlobals:
    def __getitem__(self, index: int) -> int:
        return index + self.offset()

    def offset(self) -> int:
        return counter + table["seen"]


class Refuses:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("do not look at me")


def raise_counter() -> None:
    global counter
    counter += 1


def counting_closure() -> tuple[Callable[[int], int], Callable[[], None]]:
    count = 0

    def read(index: int) -> int:
        return index + count

    def change() -> None:
        nonlocal count
        count += 1

    return read, change


def with_attributes(**values: Any) -> Bare:
    bare = Bare()
    vars(bare).update(values)
    return bare


def seen_and_changed() -> dict[str, tuple[Any, Callable[[], object]]]:
    """Things, and how to change each where a fetch might."""
    bare = with_attributes(number=1)
    nested = with_attributes(inside=[{"deep": (with_attributes(value=1.5),)}])
    slotted = Slotted()
    hidden = Slotted()
    ordered = OrderedDict(a=1)
    recent = deque([1], maxlen=5)
    tensor, large_tensor = torch.zeros(3), torch.zeros(100_000)
    array = np.zeros(3)
    numbers = {
        "torch": torch.Generator(),
        "random": random.Random(3),
        "numpy": np.random.default_rng(3),
        "old numpy": np.random.RandomState(3),
    }
    read, change = counting_closure()
    long = list(range(1000))
    return {
        "attribute": (bare, lambda: setattr(bare, "number", 2)),
        "new attribute": (nested, lambda: setattr(nested, "more", 2)),
        "deep": (nested, lambda: setattr(nested.inside[0]["deep"][0], "value", 2.5)),  # type: ignore[attr-defined]
        "slot": (slotted, lambda: setattr(slotted, "number", 2)),
        "hidden slot": (hidden, lambda: hidden.hide(3)),
        "dict": (ordered, lambda: ordered.update(b=2)),
        "deque": (recent, lambda: recent.append(2)),
        "long list": (long, lambda: long.append(2)),
        "tensor": (tensor, lambda: tensor.add_(1)),
        "large tensor": (large_tensor, lambda: large_tensor.add_(1)),
        "array": (array, lambda: np.add(array, 1, out=array)),
        "torch.Generator": (numbers["torch"], lambda: torch.rand(1, generator=numbers["torch"])),
        "random.Random": (numbers["random"], lambda: numbers["random"].random()),
        "numpy Generator": (numbers["numpy"], lambda: numbers["numpy"].random()),
        "numpy RandomState": (numbers["old numpy"], lambda: numbers["old numpy"].rand()),
        "closure": (read, change),
        "partial": (functools.partial(max, ordered), lambda: ordered.update(c=3)),
        "method": (bare.__eq__.__self__, lambda: setattr(bare, "number", 3)),
        "global number": (ReadsGlobals(), raise_counter),
        "global dict": (ReadsGlobals(), lambda: table.update(seen=table["seen"] + 1)),
        "subset": (Subset([nested], [0]), lambda: setattr(nested, "even more", 2)),
    }


@pytest.mark.parametrize("name", seen_and_changed())
def test_a_change_is_seen(name: str) -> None:
    thing, change = seen_and_changed()[name]
    before = fingerprint(thing)
    assert before is not None
    assert fingerprint(thing) == before
    change()
    assert fingerprint(thing) != before


def opaque(tmp_path: Path) -> dict[str, Any]:
    return {
        "multiprocessing value": VALUE,
        "multiprocessing lock": multiprocessing.Lock(),
        "shared array": np.frombuffer(RAW_ARRAY),
        "shared tensor": torch.zeros(2).share_memory_(),
        "writable map": np.memmap(tmp_path / "map", dtype=np.uint8, mode="w+", shape=(4,)),
        "large inference tensor": torch.inference_mode()(torch.zeros)(100_000),
        "array of objects": np.array([[]], dtype=object),
        "sparse": torch.eye(3).to_sparse(),
        "refuses": Refuses(),
        "too much": [[[index] * 1 for index in range(60)] for _ in range(60)],
    }


@pytest.mark.parametrize(
    "name",
    [
        "multiprocessing value",
        "multiprocessing lock",
        "shared array",
        "shared tensor",
        "writable map",
        "large inference tensor",
        "array of objects",
        "sparse",
        "refuses",
        "too much",
    ],
)
def test_what_could_change_unseen_has_none(name: str, tmp_path: Path) -> None:
    thing = opaque(tmp_path)[name]
    assert fingerprint(thing) is None
    assert fingerprint(SimpleNamespace(inside=[thing])) is None


def test_open_files_and_sockets_have_none(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, socket.socket() as end:
        assert fingerprint(SimpleNamespace(file=file)) is None
        assert fingerprint(SimpleNamespace(end=end)) is None


def test_fetching_from_usual_datasets_changes_nothing() -> None:
    augment = transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()])
    images = FakeData(20, (3, 16, 16), transform=augment)
    rows = TensorDataset(torch.rand(1000, 3), torch.rand(1000))
    for dataset in (images, Subset(images, range(9)), ConcatDataset([images, images]), rows):
        before = fingerprint(dataset, default_collate)
        assert before is not None
        default_collate([dataset[0], dataset[1]])
        assert fingerprint(dataset, default_collate) == before


def test_shared_lists_do_not_change() -> None:
    samples = SharedList([("a", 1)] * 1000)
    assert fingerprint(SimpleNamespace(samples=samples)) is not None


def test_read_only_maps_and_locks_can_be_looked_at(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros(10_000))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    thing = SimpleNamespace(rows=rows, lock=threading.Lock(), path=tmp_path)
    assert fingerprint(thing) is not None
    assert fingerprint(thing) == fingerprint(thing)


def test_a_dataset_that_leads_to_itself_ends() -> None:
    thing = SimpleNamespace()
    thing.self = thing
    assert fingerprint(thing) == fingerprint(thing)
