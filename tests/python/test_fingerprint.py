# SPDX-License-Identifier: Apache-2.0
"""A fingerprint changes with the object described, and is none where it could not."""

from __future__ import annotations

import array
import ctypes
import functools
import importlib
import io
import itertools
import mmap
import multiprocessing
import random
import socket
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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

ENOUGH_S = 10.0
LARGE = 20_000

settings = types.ModuleType("settings_of_the_program")
settings.__file__ = "/program/settings_of_the_program.py"
settings.__dict__["epoch"] = 0
settings.__dict__["unread"] = 0
sys.modules[settings.__name__] = settings


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


class ReadsASetting:
    def __getitem__(self, index: int) -> int:
        return index + int(settings.epoch)


class ImportsASetting:
    def __getitem__(self, index: int) -> int:
        import settings_of_the_program as mine

        return index + int(mine.epoch)


class CountsInItsClass:
    count = 0
    visits = np.zeros(LARGE)

    @staticmethod
    def offset() -> int:
        return counter

    @property
    def seen(self) -> int:
        return int(table["seen"])


class Inherits(CountsInItsClass):
    pass


class Pair(NamedTuple):
    path: str
    label: int


class CountsAsText(str):
    count = 0


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


def look(*roots: Any) -> Any:
    return fingerprint(*roots, cost_s_max=ENOUGH_S)


def small_things() -> dict[str, tuple[Any, Callable[[], object]]]:
    """Objects, and how to change each in the way of a fetch."""
    bare = with_attributes(number=1)
    nested = with_attributes(inside=[{"deep": (with_attributes(value=1.5),)}])
    slotted = Slotted()
    hidden = Slotted()
    ordered = OrderedDict(a=1, b=2)
    recent = deque([1], maxlen=5)
    tensor = torch.zeros(3)
    values = np.zeros(3)
    numbers = {
        "torch": torch.Generator(),
        "random": random.Random(3),
        "numpy": np.random.default_rng(3),
        "old numpy": np.random.RandomState(3),
    }
    read, change = counting_closure()
    text = CountsAsText("a")
    table_of_lists = with_attributes(lists=[[], []])
    table_of_lists.current = table_of_lists.lists[0]  # type: ignore[attr-defined]
    collected: list[int] = []
    return {
        "attribute": (bare, lambda: setattr(bare, "number", 2)),
        "its type alone": (bare, lambda: setattr(bare, "number", True)),
        "its sign alone": (with_attributes(it=(one := [0.0])), lambda: one.append(-one.pop())),
        "new attribute": (nested, lambda: setattr(nested, "more", 2)),
        "deep": (nested, lambda: setattr(nested.inside[0]["deep"][0], "value", 2.5)),  # type: ignore[attr-defined]
        "which of two equal lists": (
            table_of_lists,
            lambda: setattr(table_of_lists, "current", table_of_lists.lists[1]),  # type: ignore[attr-defined]
        ),
        "slot": (slotted, lambda: setattr(slotted, "number", 2)),
        "hidden slot": (hidden, lambda: hidden.hide(3)),
        "dict": (ordered, lambda: ordered.update(b=3)),
        "order of an OrderedDict": (ordered, lambda: ordered.move_to_end("a")),
        "deque": (recent, lambda: recent.append(2)),
        "tensor": (tensor, lambda: tensor.add_(1)),
        "array": (values, lambda: np.add(values, 1, out=values)),
        "attribute of a tensor": (tensor, lambda: setattr(tensor, "count", 1)),
        "attribute of a text": (text, lambda: setattr(text, "count", 1)),
        "torch.Generator": (numbers["torch"], lambda: torch.rand(1, generator=numbers["torch"])),
        "random.Random": (numbers["random"], lambda: numbers["random"].random()),
        "numpy Generator": (numbers["numpy"], lambda: numbers["numpy"].random()),
        "numpy RandomState": (numbers["old numpy"], lambda: numbers["old numpy"].rand()),
        "closure": (read, change),
        "attribute of a function": (read, lambda: setattr(read, "count", 1)),
        "partial": (functools.partial(max, ordered), lambda: ordered.update(c=3)),
        "method": (bare.__eq__.__self__, lambda: setattr(bare, "number", 3)),
        "method of a list": (with_attributes(add=collected.append), lambda: collected.append(1)),
        "weak reference": (with_attributes(of=weakref.ref(bare)), lambda: setattr(bare, "n", 1)),
        "global number": (ReadsGlobals(), raise_counter),
        "global dict": (ReadsGlobals(), lambda: table.update(seen=table["seen"] + 1)),
        "global of a module": (ReadsASetting(), raise_setting),
        "global of a module imported late": (ImportsASetting(), raise_setting),
        "class attribute": (CountsInItsClass(), lambda: setattr(CountsInItsClass, "count", 1)),
        "inherited attribute": (Inherits(), lambda: setattr(CountsInItsClass, "count", 2)),
        "array of a class": (Inherits(), lambda: np.add.at(CountsInItsClass.visits, 5, 1)),
        "class": ({"make": Inherits}, lambda: setattr(CountsInItsClass, "count", 3)),
        "global of a static method": (CountsInItsClass(), raise_counter),
        "global of a property": (CountsInItsClass(), lambda: table.update(seen=table["seen"] + 1)),
        "subset": (Subset([nested], [0]), lambda: setattr(nested, "even more", 2)),
    }


def raise_setting() -> None:
    settings.__dict__["epoch"] += 1


def large_things() -> dict[str, tuple[Any, Callable[[], object]]]:
    """A large object of each kind, and the smallest change to it."""
    tensor = torch.zeros(LARGE)
    beside = with_attributes(tensor=torch.zeros(LARGE))
    from_array = np.zeros(LARGE)
    inference = torch.inference_mode()(torch.zeros)(LARGE)
    values, view, record = (
        np.zeros(LARGE),
        np.zeros((300, 300)).T[::-2, ::3],
        np.zeros(LARGE, "i4,f8"),
    )
    locked = np.zeros(LARGE)
    unlocked = locked[:]
    locked.flags.writeable = False
    dates = np.zeros(LARGE, "datetime64[s]")
    bools = [False] * LARGE
    numbers = list(range(LARGE))
    reused = [float(index) for index in range(LARGE)]
    lists: list[list[int]] = [[] for _ in range(LARGE)]
    rows = [{"path": str(index), "boxes": [1.0, 2.0]} for index in range(1000)]
    pairs = [Pair(str(index), index) for index in range(LARGE)]
    by_name = {str(index): 0 for index in range(LARGE)}
    counts, groups = Counter(range(LARGE)), defaultdict(list, {i: [i] for i in range(LARGE)})
    ordered = OrderedDict((index, 0) for index in range(5000))
    members, recent = set(range(LARGE)), deque(range(5000))
    data = bytearray(LARGE)
    tensors = [torch.zeros(3) for _ in range(1000)]
    arrays = [np.zeros(3) for _ in range(1000)]
    objects = [with_attributes(number=index) for index in range(200)]

    def increment_twice(index: int) -> None:
        """The second number may have the first one's address."""
        for _ in range(2):
            reused[index] += 0.5

    return {
        "tensor": (tensor, lambda: tensor[17].add_(1)),
        "tensor by numpy": (tensor, lambda: np.add.at(tensor.numpy(), 17, 1)),
        "tensor by its data": (tensor, lambda: tensor.data[17].add_(1)),
        "tensor by its storage": (tensor, lambda: tensor.untyped_storage().__setitem__(17, 1)),
        "tensor beside a view": (beside, lambda: beside.tensor[5:].fill_(1)),  # type: ignore[attr-defined]
        "tensor of an array": (torch.from_numpy(from_array), lambda: from_array.fill(1)),
        "inference tensor": (inference, lambda: np.add.at(inference.numpy(), 17, 1)),
        "parameter": (torch.nn.Linear(99, 99), lambda: None),
        "array": (values, lambda: np.add.at(values, 17, 1)),
        "view of an array": (view, lambda: view.__setitem__((3, 3), 1)),
        "structured array": (record, lambda: record["f1"].__setitem__(17, 1)),
        "array of dates": (dates, lambda: dates.__setitem__(17, 1)),
        "locked array with a view": (locked, lambda: unlocked.__setitem__(17, 1)),
        "list of bools": (bools, lambda: bools.__setitem__(17, True)),
        "list of numbers": (numbers, lambda: numbers.__setitem__(17, 18)),
        "list of numbers that are made anew": (reused, lambda: increment_twice(17)),
        "list of lists": (lists, lambda: lists[17].append(1)),
        "list of dicts": (rows, lambda: rows[17].update(path="17.5")),
        "number in a list in a dict in a list": (rows, lambda: rows[17]["boxes"].pop()),  # type: ignore[attr-defined]
        "list of named tuples": (pairs, lambda: pairs.__setitem__(17, Pair("17", 18))),
        "items that change places": (numbers, lambda: numbers.sort(key=lambda number: -number)),
        "dict": (by_name, lambda: by_name.update({"17": 1})),
        "counter": (counts, lambda: counts.update([17])),
        "defaultdict": (groups, lambda: groups[17].append(1)),
        "ordered dict": (ordered, lambda: ordered.update({17: 1})),
        "set": (members, lambda: (members.remove(17), members.add(-1))),
        "deque": (recent, lambda: recent.rotate()),
        "bytearray": (data, lambda: data.__setitem__(17, 1)),
        "list of tensors": (tensors, lambda: tensors[17].add_(1)),
        "attribute of a tensor in a list": (tensors, lambda: setattr(tensors[17], "count", 1)),
        "list of arrays": (arrays, lambda: np.add.at(arrays[17], 1, 1)),
        "list of objects": (objects, lambda: setattr(objects[17], "number", 18)),
        "list of huge numbers": (
            huge := [10**30] * 100,
            lambda: huge.__setitem__(17, 10**30 + 1),
        ),
    }


def check_change_is_detected(thing: Any, change: Callable[[], object]) -> None:
    for whole in (thing, SimpleNamespace(inside=[thing])):
        before = look(whole)
        assert before is not None
        assert look(whole) == before
    change()
    assert look(whole) is not None
    assert look(whole) != before


@pytest.mark.parametrize("name", small_things())
def test_change_of_a_small_object_is_detected(name: str) -> None:
    check_change_is_detected(*small_things()[name])


@pytest.mark.parametrize("name", large_things())
def test_change_of_a_large_object_is_detected(name: str) -> None:
    """`self.visits[index] += 1` in an array of 5 KiB or a list of 65 items was counted twice."""
    thing, change = large_things()[name]
    if isinstance(thing, torch.nn.Module):
        weight = thing.weight.detach()
        change = weight[3].zero_
    check_change_is_detected(thing, change)


def test_unread_global_does_not_prevent_a_fingerprint() -> None:
    before = look(ReadsASetting())
    settings.__dict__["unread"] += 1
    assert look(ReadsASetting()) is not None
    assert look(before) is not None


def opaque(tmp_path: Path) -> dict[str, Any]:
    return {
        "multiprocessing value": VALUE,
        "multiprocessing lock": multiprocessing.Lock(),
        "shared array": np.frombuffer(RAW_ARRAY),
        "shared tensor": torch.zeros(2).share_memory_(),
        "writable map": np.memmap(tmp_path / "map", dtype=np.uint8, mode="w+", shape=(4,)),
        "tensor of a shared array": torch.from_numpy(np.frombuffer(RAW_ARRAY)),
        "locked view of a shared array": locked_view(np.frombuffer(RAW_ARRAY)),
        "map": mmap.mmap(-1, 4096),
        "array of a shared map": np.frombuffer(mmap.mmap(-1, 4096), np.uint8),
        "array.array": array.array("d", [0.0]),
        "ctypes": (ctypes.c_int * 3)(),
        "BytesIO": io.BytesIO(b"abc"),
        "iterator": itertools.count(),
        "generator": (index for index in range(3)),
        "cache": functools.lru_cache(lambda index: index),
        "array of objects": np.array([[]], dtype=object),
        "sparse": torch.eye(3).to_sparse(),
        "refuses": Refuses(),
        "what is kept in C beside attributes": torch.futures.Future(),
    }


OPAQUE = [
    "multiprocessing value",
    "multiprocessing lock",
    "shared array",
    "shared tensor",
    "writable map",
    "tensor of a shared array",
    "locked view of a shared array",
    "map",
    "array of a shared map",
    "array.array",
    "ctypes",
    "BytesIO",
    "iterator",
    "generator",
    "cache",
    "array of objects",
    "sparse",
    "refuses",
    "what is kept in C beside attributes",
]


def locked_view(values: Any) -> Any:
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_objects_have_no_fingerprint(name: str, tmp_path: Path) -> None:
    thing = opaque(tmp_path)[name]
    assert look(thing) is None
    assert look(SimpleNamespace(inside=[thing])) is None


def test_all_opaque_objects_are_listed(tmp_path: Path) -> None:
    assert list(opaque(tmp_path)) == OPAQUE


@pytest.mark.parametrize(
    "thing",
    [np.zeros(10**6), torch.zeros(10**6), list(range(10**6)), [Path("a")] * 10**5],
    ids=["array", "tensor", "list", "objects"],
)
def test_objects_over_the_time_limit_have_no_fingerprint(thing: Any) -> None:
    assert fingerprint(thing, cost_s_max=1e-5) is None
    assert fingerprint(thing, cost_s_max=10) is not None


def deeply(nested: Any, depth: int) -> Any:
    for _ in range(depth):
        nested = [nested]
    return nested


def test_deep_nests_and_cyclic_lists_have_no_fingerprint() -> None:
    assert look(deeply(1, 60)) is not None
    assert look(deeply(1, 100_000)) is None
    loop: list[Any] = [0] * 100
    loop.append(loop)
    assert look(loop) is None


def test_inspection_leaves_reference_counts_unchanged() -> None:
    """Writing to a reference count copies a page, in each worker."""
    samples = [(f"{index}.jpeg", float(index)) for index in range(1000)]
    counts = [sys.getrefcount(item) for pair in samples for item in (pair, *pair)]
    before = look(samples)
    assert [sys.getrefcount(item) for pair in samples for item in (pair, *pair)] == counts
    assert look(samples) == before


def test_open_files_and_sockets_have_no_fingerprint(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, socket.socket() as end:
        assert look(SimpleNamespace(file=file)) is None
        assert look(SimpleNamespace(end=end)) is None


def test_fetching_from_common_datasets_keeps_the_fingerprint() -> None:
    augment = transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()])
    images = FakeData(20, (3, 16, 16), transform=augment)
    rows = TensorDataset(torch.rand(1000, 3), torch.rand(1000))
    for dataset in (images, Subset(images, range(9)), ConcatDataset([images, images]), rows):
        before = look(dataset, default_collate)
        assert before is not None
        default_collate([dataset[0], dataset[1]])
        assert look(dataset, default_collate) == before


def test_shared_lists_have_a_fingerprint() -> None:
    samples = SharedList([("a", 1)] * 1000)
    assert look(SimpleNamespace(samples=samples)) is not None


def test_read_only_maps_and_locks_have_a_stable_fingerprint(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros(10_000))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    thing = SimpleNamespace(rows=rows, lock=threading.Lock(), path=tmp_path)
    assert look(thing) is not None
    assert look(thing) == look(thing)


def test_inspection_of_a_self_referencing_dataset_terminates() -> None:
    thing = SimpleNamespace()
    thing.self = thing
    assert look(thing) == look(thing)


LIBRARY = {
    "__init__.py": "from {name}.augment import shift, count_up, pick\nfrom {name} import rng\n",
    "augment.py": (
        "import logging\nfrom {name}.rng import GLOBAL\n"
        "logger = logging.getLogger(__name__)\nCALLS = 0\nCHOICES = {{'a': 1}}\n"
        "def shift():\n    return GLOBAL.generator.random()\n"
        "def count_up():\n    global CALLS\n    CALLS += 1\n"
        "def pick():\n    CHOICES['b'] = 2\n"
    ),
    "rng.py": (
        "import numpy as np\nclass Rng:\n    def __init__(self):\n"
        "        self.generator = np.random.default_rng(0)\nGLOBAL = Rng()\n"
    ),
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes an installed package with that name, and imports it."""
    folder = tmp_path / "lib" / "site-packages"
    monkeypatch.syspath_prepend(str(folder))

    def install(name: str) -> Any:
        (folder / name).mkdir(parents=True)
        for file, text in LIBRARY.items():
            (folder / name / file).write_text(text.format(name=name))
        return importlib.import_module(name)

    return install


class Augmenting:
    def __init__(self, augment: Callable[[], object]) -> None:
        self.augment = augment

    def __getitem__(self, index: int) -> object:
        return self.augment()


@pytest.mark.parametrize("change", ["shift", "count_up", "pick"])
def test_state_change_of_an_installed_package_is_detected(
    installed: Callable[[str], Any], change: str
) -> None:
    library = installed(f"installed_{change}")
    dataset = Augmenting(library.shift)
    before = look(dataset)
    assert before is not None
    assert look(dataset) == before
    getattr(library, change)()
    assert look(dataset) != before


def test_state_change_of_a_transitive_package_is_detected(
    installed: Callable[[str], Any], tmp_path: Path
) -> None:
    inner = installed("installed_inner")
    folder = tmp_path / "lib" / "site-packages" / "installed_outer"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import installed_inner\ndef draw():\n    return installed_inner.shift()\n"
    )
    outer = importlib.import_module("installed_outer")
    before = look(Augmenting(outer.draw))
    assert before is not None
    inner.shift()
    assert look(Augmenting(outer.draw)) != before


def test_package_with_compiled_modules_has_no_fingerprint(installed: Callable[[str], Any]) -> None:
    library = installed("installed_compiled")
    compiled = types.ModuleType("installed_compiled.fast")
    compiled.__file__ = "/lib/site-packages/installed_compiled/fast.so"
    sys.modules[compiled.__name__] = compiled
    assert look(Augmenting(library.shift)) is None
