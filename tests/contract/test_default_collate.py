# SPDX-License-Identifier: Apache-2.0
"""Every branch of torch's default_collate and default_convert, with workers and without."""

from __future__ import annotations

import array
import collections
import dataclasses
import decimal
import enum
import fractions
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from case_streams import assert_same_outcomes, in_batches, one_by_one
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map


class Point(NamedTuple):
    x: Any
    y: Any


class TaggedPoint(Point):
    """A child of a namedtuple."""


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Name(str):
    """A child of str."""


class Metres(float):
    """A child of float."""


class Count(int):
    """A child of int."""


class Labelled(dict[str, Any]):
    """A dict with an attribute in addition to its items."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.label = "kept"


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be changed and is made from a mapping."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Unmakeable(Frozen):
    """A mapping whose constructor takes other arguments: collate returns a dict."""

    def __init__(self, first: str, second: Any) -> None:
        super().__init__({first: second})


class TaggedList(list[Any]):
    """A list with an attribute in addition to its items."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.label = "kept"


class TaggedTuple(tuple[Any, ...]):
    """A child of tuple that is no namedtuple: collate returns a list."""


class Tagged(torch.Tensor):
    """A tensor subclass without additional behaviour."""


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


class Plain:
    """A type unknown to collate."""


def floats(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4))


def both(make: Callable[[], Any]) -> Callable[[], list[Any]]:
    """Two samples of a kind."""
    return lambda: [make(), make()]


TENSORS: dict[str, Callable[[], list[Any]]] = {
    "tensors": both(lambda: floats(2, 3)),
    "one tensor": lambda: [floats(3)],
    "scalars": lambda: [torch.tensor(1.5), torch.tensor(2.5)],
    "empty tensors": both(lambda: floats(0, 3)),
    "tensors of no rows": both(lambda: torch.empty(0)),
    "bool tensors": lambda: [torch.tensor([True, False]), torch.tensor([False, False])],
    "bfloat16 tensors": both(lambda: floats(3).bfloat16()),
    "float8 tensors": both(lambda: floats(3).to(torch.float8_e4m3fn)),
    "complex tensors": both(lambda: torch.complex(floats(3), floats(3))),
    "uint16 tensors": both(lambda: torch.tensor([1, 65535], dtype=torch.uint16)),
    "nan, infinities and the sign of zero": both(
        lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    ),
    "a nan with a payload": both(lambda: torch.tensor([0x7FC12345]).int().view(torch.float32)),
    "transposed tensors": both(lambda: floats(2, 3).t()),
    "stepped tensors": both(lambda: floats(9)[1::3]),
    "expanded tensors": both(lambda: floats(3).expand(4, 3)),
    "channels-last images": both(
        lambda: floats(1, 3, 4, 5).to(memory_format=torch.channels_last)[0]
    ),
    "channels-last batches": both(lambda: floats(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "channels-last then contiguous": lambda: [
        floats(2, 3, 4, 5).to(memory_format=torch.channels_last),
        floats(2, 3, 4, 5),
    ],
    "images as PIL gives them": both(lambda: floats(4, 5, 3).permute(2, 0, 1)),
    "conjugates": both(lambda: torch.complex(floats(3), floats(3)).conj()),
    "negatives": both(lambda: torch._neg_view(floats(3))),
    "views of a large tensor": both(lambda: floats(1000)[10:13]),
    "different shapes": lambda: [floats(2), floats(3)],
    "different numbers of dimensions": lambda: [floats(2), floats(2, 1)],
    "a later different shape": lambda: [floats(2), floats(2), floats(1)],
    "same count, different shape": lambda: [floats(2, 3), floats(3, 2)],
    "int32 then int64": lambda: [torch.arange(2, dtype=torch.int32), torch.arange(2)],
    "int64 then float32": lambda: [torch.arange(2), floats(2)],
    "float32 then int64": lambda: [floats(2), torch.arange(2)],
    "float32 then float64": lambda: [floats(2), floats(2).double()],
    "bool then uint8": lambda: [torch.tensor([True]), torch.tensor([3], dtype=torch.uint8)],
    "tensor then number": lambda: [floats(()), 3.0],
    "number then tensor": lambda: [3.0, floats(())],
    "number then vector": lambda: [3.0, floats(2)],
    "tensor then None": lambda: [floats(2), None],
    "tensor then array": lambda: [torch.ones(2), np.ones(2)],
    "parameters": both(lambda: torch.nn.Parameter(floats(2))),
    "leaves that require grad": both(lambda: floats(2).requires_grad_()),
    "plain then requires grad": lambda: [floats(2), floats(2).requires_grad_()],
    "no longer leaves": both(lambda: floats(2).requires_grad_() * 2),
    "a tensor subclass": both(lambda: floats(2).as_subclass(Tagged)),
    "plain then a tensor subclass": lambda: [floats(2), floats(2).as_subclass(Tagged)],
    "a tensor with an attribute": lambda: [with_label(floats(2)), floats(2)],
    "sparse tensors": both(lambda: torch.eye(3).to_sparse()),
    "sparse CSR tensors": both(lambda: torch.eye(3).to_sparse_csr()),
    "plain then sparse": lambda: [torch.eye(3), torch.eye(3).to_sparse()],
    "nested tensors": both(lambda: torch.nested.nested_tensor([floats(2), floats(3)])),
    "jagged tensors": both(
        lambda: torch.nested.nested_tensor([floats(2), floats(3)], layout=torch.jagged)
    ),
    "meta tensors": both(lambda: torch.empty(3, device="meta")),
    "plain then meta": lambda: [floats(3), torch.empty(3, device="meta")],
    "inference tensors": both(lambda: made_in_inference_mode()),
    "quantised tensors": both(lambda: torch.quantize_per_tensor(floats(4), 0.1, 3, torch.quint8)),
    "buffers": both(lambda: torch.nn.Buffer(floats(2))),
}


def with_label(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = "lost"  # type: ignore[attr-defined]
    return tensor


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return floats(3)


def read_only() -> Any:
    rows = np.arange(4)
    rows.flags.writeable = False
    return rows


NUMPY: dict[str, Callable[[], list[Any]]] = {
    "arrays": both(lambda: np.arange(6, dtype=np.int16).reshape(2, 3)),
    "arrays of no dimensions": both(lambda: np.array(2.5, dtype=np.float32)),
    "arrays in Fortran's order": both(lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "stepped arrays": both(lambda: np.arange(9)[::2]),
    "reversed arrays": both(lambda: np.arange(4)[::-1]),
    "big-endian arrays": both(lambda: np.arange(4, dtype=">i4")),
    "read-only arrays": both(read_only),
    "empty arrays": both(lambda: np.empty((0, 3))),
    "bool arrays": both(lambda: np.array([True, False])),
    "float16 arrays": both(lambda: np.arange(3, dtype=np.float16)),
    "complex arrays": both(lambda: np.arange(3) + 1j),
    "uint64 arrays": both(lambda: np.arange(3, dtype=np.uint64)),
    "arrays of strings": both(lambda: np.array(["a", "bc"])),
    "arrays of bytes": both(lambda: np.array([b"a", b"bc"])),
    "arrays of objects": both(lambda: np.array([None, 1], dtype=object)),
    "arrays of times": both(lambda: np.array(["2020-01-01"], dtype="datetime64[D]")),
    "structured arrays": both(lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f4")])),
    "arrays of different shapes": lambda: [np.ones(2), np.ones(3)],
    "arrays of different dtypes": lambda: [np.ones(2, np.float32), np.ones(2, np.float64)],
    "array then list": lambda: [np.ones(2), [1.0, 1.0]],
    "array then tensor": lambda: [np.ones(2), torch.ones(2, dtype=torch.float64)],
    "memory-mapped kind": both(lambda: np.arange(3.0).view(np.recarray)),
    "arrays of one element, reversed": both(lambda: np.arange(1)[::-1]),
    "columns of a table": both(lambda: np.arange(12).reshape(4, 3)[:, 1]),
    "rows of a table": lambda: [*np.arange(12, dtype=np.float32).reshape(4, 3)],
    "complex64 arrays": both(lambda: np.arange(3).astype(np.complex64)),
    "long long arrays": both(lambda: np.arange(3, dtype=np.longlong)),
    "writable then read-only arrays": lambda: [np.arange(4), read_only()],
    "array then memory map": lambda: [np.arange(3.0), mapped(np.arange(3.0))],
    "memory maps": both(lambda: mapped(np.arange(3.0))),
    "rows of a memory map": lambda: [*mapped(np.arange(6.0).reshape(2, 3))],
    "array then scalar": lambda: [np.arange(3.0), np.float64(1)],
    "array then array of no dimensions": lambda: [np.ones(1), np.array(1.0)],
    "a nan with a payload in arrays": both(lambda: np.array([0x7FC12345], "i4").view("f4")),
    "masked arrays": both(lambda: np.ma.array([1, 2], mask=[0, 1])),
    "float32 scalars": lambda: [np.float32(1.5), np.float32(-0.0)],
    "float64 scalars": lambda: [np.float64(1.5), np.float64("nan")],
    "float16 scalars": lambda: [np.float16(1.5), np.float16(2)],
    "int scalars": lambda: [np.int32(1), np.int32(-5)],
    "uint8 scalars": lambda: [np.uint8(1), np.uint8(255)],
    "bool scalars": lambda: [np.bool_(True), np.bool_(False)],
    "int8 scalars": lambda: [np.int8(-128), np.int8(127)],
    "int16 scalars": lambda: [np.int16(-5), np.int16(300)],
    "int64 scalars": lambda: [np.int64(2**63 - 1), np.int64(-(2**63))],
    "uint64 scalars": lambda: [np.uint64(1), np.uint64(2)],
    "long long scalars": lambda: [np.longlong(1), np.longlong(2)],
    "float32 nan with a payload": lambda: [np.array([0x7FC12345], "i4").view("f4")[0]] * 2,
    "float32 then float64 scalars": lambda: [np.float32(0.1), np.float64(0.1)],
    "int64 scalar then int": lambda: [np.int64(1), 2],
    "int then int64 scalar": lambda: [1, np.int64(2)],
    "bool then bool scalar": lambda: [True, np.bool_(False)],
    "float64 scalar then array": lambda: [np.float64(1), np.ones(2)],
    "scalar then None": lambda: [np.float32(1), None],
    "string scalars": lambda: [np.str_("a"), np.str_("b")],
    "bytes scalars": lambda: [np.bytes_(b"a"), np.bytes_(b"b")],
    "time scalars": lambda: [np.datetime64("2020-01-01")] * 2,
    "complex scalars": lambda: [np.complex64(1j), np.complex64(2)],
    "int32 then int64 scalars": lambda: [np.int32(1), np.int64(2)],
    "float32 then Python float": lambda: [np.float32(1), 2.0],
    "Python float then float32": lambda: [1.0, np.float32(2)],
    "int64 then float64 scalars": lambda: [np.int64(1), np.float64(2.5)],
}


def mapped(array: Any) -> Any:
    """A copy of an array in a file that is mapped for reading."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, array)
        return np.load(file.name, mmap_mode="r")


NUMBERS: dict[str, Callable[[], list[Any]]] = {
    "ints": lambda: [1, -2, 3],
    "ints at the edge": lambda: [2**63 - 1, -(2**63)],
    "ints beyond 64 bits": lambda: [2**63, 1],
    "ints above int64 alone": lambda: [2**64 - 1],
    "floats": lambda: [1.5, -0.0, float("nan"), float("inf")],
    "float too small for float32": lambda: [1e-300, 1e300],
    "bools": lambda: [True, False],
    "complex numbers": lambda: [1j, 2 + 0j],
    "int then float": lambda: [1, 2.5],
    "float then int": lambda: [2.5, 1],
    "int then bool": lambda: [5, True],
    "bool then int": lambda: [True, 5],
    "bool then float": lambda: [True, 0.5],
    "float then bool": lambda: [0.5, True],
    "float then a big int": lambda: [0.5, 2**70],
    "int then None": lambda: [1, None],
    "int then string": lambda: [1, "2"],
    "float then string": lambda: [1.0, "2"],
    "int enum": lambda: [Colour.RED, Colour.BLUE],
    "children of int": lambda: [Count(4), Count(5)],
    "children of float": lambda: [Metres(4), Metres(5)],
    "fractions": both(lambda: fractions.Fraction(1, 3)),
    "decimals": both(lambda: decimal.Decimal("1.5")),
}

TEXTS: dict[str, Callable[[], list[Any]]] = {
    "strings": lambda: ["a", "", "ünïcode \U0001f600", "nul\0inside"],
    "lone surrogates": lambda: ["\ud800", "b"],
    "bytes": lambda: [b"a", b"", b"\0\xff"],
    "children of str": lambda: [Name("a"), "b"],
    "string then None": lambda: ["a", None],
    "string then int": lambda: ["a", 1],
    "bytearrays": both(lambda: bytearray(b"ab")),
    "arrays of the array module": both(lambda: array.array("d", [1.0, 2.0])),
    "long strings": both(lambda: "photograph " * 5000),
}

NESTS: dict[str, Callable[[], list[Any]]] = {
    "tuples": lambda: [(floats(2), 1, "a"), (floats(2), 2, "b")],
    "lists": lambda: [[floats(2), 1.5], [floats(2), 2.5]],
    "a list of strings in a tuple": lambda: [(["a", "b"], 1), (["c", "d"], 2)],
    "strings in a tuple": lambda: [("a", "b"), ("c", "d")],
    "strings in a dict": lambda: [{"name": "a", "id": 1}, {"name": "b", "id": 2}],
    "dicts": lambda: [{"x": floats(2), "y": 1}, {"x": floats(2), "y": 2}],
    "dicts in another order": lambda: [{"x": 1, "y": 2.0}, {"y": 3.0, "x": 4}],
    "dicts of numbers of all kinds": lambda: [
        {"a": 1, "b": 2.5, "c": True, "d": np.float32(0.1), "e": np.int64(3), "f": "x"},
        {"a": 2, "b": -0.0, "c": False, "d": np.float32(2), "e": np.int64(-3), "f": "y"},
    ],
    "many rows of numbers": lambda: [
        {"a": row, "b": row / 7, "c": (np.int32(row), str(row), row % 2 == 0)} for row in range(101)
    ],
    "rows of which one has another number": lambda: [
        {"a": row, "b": 1.5 if row < 60 else 2, "c": np.float32(row)} for row in range(70)
    ],
    "rows with a big int at the end": lambda: [
        (row, 2**63 if row == 50 else 1) for row in range(51)
    ],
    "rows of which one has other keys": lambda: [
        {"a": row, "b" if row < 40 else "c": 1} for row in range(50)
    ],
    "rows of which one is in another order": lambda: [
        {"a": row, "b": 1.0} if row != 40 else {"b": 2.0, "a": row} for row in range(50)
    ],
    "a row with more keys among numbers": lambda: [{"a": 1}, {"a": 2, "b": 3}, {"b": 5, "a": 4}],
    "equal keys that are different objects": lambda: [{10**9 + k: k} for k in (0, 0)],
    "a dict with more keys": lambda: [{"x": 1}, {"x": 2, "y": 3}],
    "a dict with fewer keys": lambda: [{"x": 1, "y": 2}, {"x": 3}],
    "dicts with keys of all kinds": both(lambda: {1: 2.0, None: 1, (1, 2): "a", b"k": True}),
    "empty dicts": lambda: [{}, {}],
    "empty tuples": lambda: [(), ()],
    "empty lists": lambda: [[], []],
    "namedtuples": lambda: [Point(floats(2), 1), Point(floats(2), 2)],
    "children of a namedtuple": both(lambda: TaggedPoint(1, 2)),
    "namedtuples of another length": lambda: [Point(1, 2), (3, 4, 5)],
    "children of tuple": both(lambda: TaggedTuple((1, 2))),
    "deep nests": both(lambda: {"a": [{"b": (floats(2), {"c": Point([1, 2], ("x",))})}]}),
    "tuples of different lengths": lambda: [(1, 2), (1, 2, 3)],
    "lists of different lengths": lambda: [[1], []],
    "a tuple then a list": lambda: [(1, 2), [3, 4]],
    "a list then a tuple": lambda: [[1, 2], (3, 4)],
    "a dict then a tuple": lambda: [{"a": 1}, (1,)],
    "a tuple then a number": lambda: [(1,), 2],
    "ordered dicts": both(lambda: collections.OrderedDict([("b", 1), ("a", 2)])),
    "default dicts": both(lambda: collections.defaultdict(list, {"a": 1})),
    "counters": both(lambda: collections.Counter("aab")),
    "mapping proxies": both(lambda: types.MappingProxyType({"a": 1})),
    "dicts with attributes": both(lambda: Labelled({"a": 1})),
    "mappings of one's own": both(lambda: Frozen({"a": floats(2)})),
    "mappings that cannot be made": both(lambda: Unmakeable("a", 1)),
    "user dicts": both(lambda: collections.UserDict({"a": 1})),
    "lists with attributes": both(lambda: TaggedList([1, 2.0])),
    "user lists": both(lambda: collections.UserList([1, 2.0])),
    "deques": both(lambda: collections.deque([1, 2.0])),
    "ranges": both(lambda: range(3)),
    "a memoryview": both(lambda: memoryview(b"ab")),
    "tuples of one tensor": both(lambda: (floats(3),)),
    "the same tensor twice in a sample": both(lambda: (lambda part: (part, part))(floats(2))),
    "the same list twice in a sample": both(lambda: (lambda part: [part, part])([1, 2])),
    "None": lambda: [None, None],
    "None in a tuple": lambda: [(1, None), (2, None)],
    "ellipses": lambda: [..., ...],
    "sets": both(lambda: {1, 2}),
    "dataclasses": both(lambda: Pair(1, 2)),
    "objects": both(Plain),
    "classes": lambda: [Plain, Plain],
    "generators of torch": both(lambda: torch.Generator()),
    "torch.Size": both(lambda: torch.Size([1, 2])),
    "shapes and dtypes": both(lambda: (torch.Size([2]), "a")),
    "dtypes": both(lambda: torch.float32),
    "wide tuples": both(lambda: tuple(range(300))),
}

ALL = {**TENSORS, **NUMPY, **NUMBERS, **TEXTS, **NESTS}


# Torch's loader waits for ever when a worker's batch cannot be pickled.
UNPICKLABLE = {"mapping proxies"}


def test_case_names_are_unique() -> None:
    assert len(ALL) == sum(map(len, (TENSORS, NUMPY, NUMBERS, TEXTS, NESTS)))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_kind_of_sample_collates_as_with_torch(loader_class: type, workers: int) -> None:
    cases = {name: make for name, make in ALL.items() if not workers or name not in UNPICKLABLE}
    assert_same_outcomes(loader_class, cases, in_batches, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_every_kind_of_sample_converts_as_with_torch(loader_class: type, workers: int) -> None:
    """Without batches a sample is passed to default_convert alone."""
    # Torch's workers drop a conjugation silently and break quantised tensors: no contract.
    broken = {"conjugates", "negatives", "quantised tensors"}
    unfit = {*UNPICKLABLE, *broken, "a memoryview", "no longer leaves"}
    cases = {name: make for name, make in ALL.items() if not workers or name not in unfit}
    assert_same_outcomes(loader_class, cases, one_by_one, num_workers=workers)


def first_and_count(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    return (type(batch[0]).__name__, len(batch))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Plain, torch.Tensor, int, str, Tagged, np.ndarray, Point, object])
def test_additions_to_the_collate_registry_are_used(
    loader_class: type, kind: type, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, first_and_count)
    names = ("tensors", "a tensor subclass", "ints", "bools", "strings", "objects", "arrays")
    names += ("namedtuples", "tuples", "strings in a dict", "deep nests", "children of int")
    cases = {name: ALL[name] for name in names}
    assert_same_outcomes(loader_class, cases, in_batches, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_default_dtype_applies_as_with_torch(loader_class: type, workers: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_outcomes(loader_class, NUMBERS, in_batches, num_workers=workers)
    finally:
        torch.set_default_dtype(torch.float32)


def make_tensors_on_meta(worker_id: int) -> None:
    torch.set_default_device("meta")


def test_default_device_of_a_worker_applies_as_with_torch(loader_class: type) -> None:
    """Numbers arrived as CPU tensors all the same."""
    names = ("ints", "floats", "arrays", "float32 scalars", "dicts of numbers of all kinds")
    assert_same_outcomes(
        loader_class,
        {name: ALL[name] for name in names},
        in_batches,
        num_workers=1,
        worker_init_fn=make_tensors_on_meta,
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_default_collate_called_by_a_collate_fn_matches_torch(
    loader_class: type, workers: int
) -> None:
    cases = {name: ALL[name] for name in ("tuples", "dicts", "deep nests", "arrays", "strings")}
    assert_same_outcomes(
        loader_class,
        cases,
        in_batches,
        num_workers=workers,
        collate_fn=lambda samples: {"inner": default_collate(samples), "count": len(samples)},
    )


@pytest.mark.parametrize("batch_size", [None, 2])
def test_collate_fn_attribute_is_the_function_of_torch(
    loader_class: type, batch_size: int | None
) -> None:
    from torch.utils.data import default_convert

    loader = loader_class([1, 2], batch_size=batch_size)
    assert loader.collate_fn is (default_convert if batch_size is None else default_collate)
