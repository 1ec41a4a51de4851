# SPDX-License-Identifier: Apache-2.0
"""Every kind of object as a batch: it arrives in the trainer as from torch's workers."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from case_streams import assert_same_outcomes, one_by_one
from sample_datasets import as_is

DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 uint1 uint4 int4"
).split()


class Box(NamedTuple):
    corner: Any
    size: Any


@dataclasses.dataclass
class Record:
    image: Any
    label: Any = 3


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenRecord:
    image: Any
    label: Any


class Parsed:
    """An object of a user's class, with a tensor inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Reduced(Parsed):
    """Decides by itself how it is pickled."""

    def __reduce__(self) -> Any:
        return (Reduced, (("through", self.value),))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Slotted({self.value})"


class Failing(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Shade(enum.Enum):
    DARK = "d"


class Name(str):
    """A child of str with an attribute."""


class Tagged(torch.Tensor):
    """A tensor subclass that carries an attribute."""


class Labelled(dict[str, Any]):
    pass


class Ring(list[Any]):
    pass


def floats(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4))


def of_dtype(name: str) -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8).view(getattr(torch, name))


def tagged() -> torch.Tensor:
    tensor = floats(3).as_subclass(Tagged)
    tensor.origin = "camera"  # type: ignore[attr-defined]
    return tensor


def labelled() -> Labelled:
    items = Labelled(a=floats(2))
    items.note = "kept"  # type: ignore[attr-defined]
    return items


def ring() -> Ring:
    items = Ring([1])
    items.append(items)
    return items


def twice(make: Callable[[], Any]) -> list[Any]:
    part = make()
    return [part, part, {"again": part}]


def views() -> list[torch.Tensor]:
    whole = floats(3, 4)
    return [whole[0], whole[1:], whole.T, whole]


def read_only() -> Any:
    rows = np.arange(4)
    rows.flags.writeable = False
    return rows


def with_gradient() -> torch.Tensor:
    leaf = floats(2).requires_grad_()
    leaf.sum().backward()
    return leaf


TENSORS: dict[str, Callable[[], Any]] = {
    **{f"dtype {name}": (lambda name=name: of_dtype(name)) for name in DTYPES},
    "no dimensions": lambda: torch.tensor(2.5),
    "no elements": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 3),
    "no columns": lambda: torch.empty(3, 0, 2),
    "no elements, own strides": lambda: torch.empty_strided((0, 3), (7, 2)),
    "one element, own strides": lambda: torch.empty_strided((1, 1), (7, 5)).fill_(2),
    "many dimensions": lambda: floats(*[1, 2] * 8),
    "a transposed tensor": lambda: floats(3, 4).t(),
    "a permuted tensor": lambda: floats(2, 3, 4).permute(2, 0, 1),
    "a stepped tensor": lambda: floats(20)[3::4],
    "an expanded tensor": lambda: floats(3).expand(4, 3),
    "a tensor expanded from one": lambda: torch.tensor(7).expand(2, 2),
    "a diagonal": lambda: floats(4, 4).diagonal(),
    "overlapping windows": lambda: floats(8).unfold(0, 4, 2),
    "channels last": lambda: floats(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last in three dimensions": lambda: floats(2, 3, 2, 4, 5).to(
        memory_format=torch.channels_last_3d
    ),
    "a slice of a large tensor": lambda: floats(5000)[100:103],
    "half a megabyte": lambda: floats(1 << 17),
    "a page and a byte": lambda: torch.arange(4097, dtype=torch.int32).to(torch.uint8),
    "odd sizes side by side": lambda: [of_dtype("uint8")[:size].clone() for size in range(1, 9)],
    "special floats": lambda: torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0]),
    "a leaf that requires grad": lambda: floats(2).requires_grad_(),
    "a leaf with a gradient": with_gradient,
    "a parameter": lambda: torch.nn.Parameter(floats(2)),
    "a parameter without grad": lambda: torch.nn.Parameter(floats(2), requires_grad=False),
    "a buffer": lambda: torch.nn.Buffer(floats(2)),
    "a tensor subclass with an attribute": tagged,
    "a transposed tensor subclass": lambda: floats(2, 3).as_subclass(Tagged).t(),
    "sparse COO": lambda: torch.eye(3).to_sparse(),
    "sparse COO with doubles": lambda: torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], [1.0, 2.0], (3, 3)
    ),
    "sparse COO with dense rows": lambda: torch.sparse_coo_tensor([[0, 2]], floats(2, 5), (3, 5)),
    "sparse COO without values": lambda: torch.sparse_coo_tensor(size=(3, 4)),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "sparse CSC": lambda: torch.eye(3).to_sparse_csc(),
    "sparse BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse BSC": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([floats(2), floats(3)]),
    "jagged": lambda: torch.nested.nested_tensor([floats(2), floats(3)], layout=torch.jagged),
    "a packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([floats(3), floats(2)]),
    "a meta tensor": lambda: torch.empty(3, device="meta"),
    "shared memory of the worker's": lambda: floats(3).share_memory_(),
    "a storage": lambda: floats(3).untyped_storage().clone(),
    "a module": lambda: module_of_ones(),
    "a state dict": lambda: module_of_ones().state_dict(),
    "three hundred tensors": lambda: [torch.tensor([number]) for number in range(300)],
    "the same tensor twice": lambda: twice(lambda: floats(3)),
    "the same large tensor twice": lambda: twice(lambda: floats(1 << 16)),
    "the same parameter twice": lambda: twice(lambda: torch.nn.Parameter(floats(3))),
    "views of one tensor": views,
}


def module_of_ones() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    return module


OBJECTS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "ints": lambda: [0, -1, 2**31, 2**63 - 1, -(2**63), 2**63, -(2**200), 10**1000],
    "floats": lambda: [0.1, -0.0, float("inf"), float("nan"), 5e-324, 1e308],
    "complex": lambda: [1j, complex(float("nan"), -0.0)],
    "strings": lambda: ["", "a", "ünïcode \U0001f600", "nul\0inside", "\ud800", "x" * 100_000],
    "raw bytes": lambda: [b"", b"\0\xff", b"y" * 100_000],
    "bytearrays": lambda: bytearray(b"abc"),
    "a child of str": lambda: Name("n"),
    "empty containers": lambda: [[], (), {}, set(), frozenset(), ""],
    "dicts with keys of all kinds": lambda: {
        1: "a",
        None: 2,
        (1, "b"): 3,
        b"k": 4,
        2.5: 5,
        False: 6,
    },
    "dicts keep their order": lambda: {"z": 1, "a": 2, "m": 3},
    "an ordered dict": lambda: collections.OrderedDict([("b", floats(2)), ("a", 1)]),
    "a default dict": lambda: collections.defaultdict(list, {"a": [floats(2)]}),
    "a counter": lambda: collections.Counter("aab"),
    "a dict with an attribute": labelled,
    "a user dict": lambda: collections.UserDict({"a": floats(2)}),
    "a deque": lambda: collections.deque([floats(2), 1], maxlen=4),
    "sets": lambda: [{1, "a"}, frozenset({2, None})],
    "a range": lambda: range(3, 9, 2),
    "a slice": lambda: slice(1, None, 2),
    "namedtuples": lambda: Box(floats(2), Box(1, None)),
    "tuples of tuples": lambda: ((), ((1,),), (floats(1), ("a", [None]))),
    "a torch.Size": lambda: torch.Size([2, 3]),
    "torch's return types": lambda: torch.max(floats(2, 3), 1),
    "dataclasses": lambda: Record(floats(2)),
    "dataclasses in dataclasses": lambda: Record(Record(floats(2), [1]), {"a": Record(1)}),
    "frozen dataclasses with slots": lambda: FrozenRecord(floats(2), "b"),
    "a dataclass with an added attribute": lambda: with_added_attribute(),
    "objects": lambda: Parsed([floats(2), Parsed("x")]),
    "an object that reduces itself": lambda: Reduced(1),
    "an object with slots": lambda: Slotted(3),
    "an exception as data": lambda: ValueError("only data"),
    "an exception with two arguments as data": lambda: Failing(3, "only data"),
    "an enumeration": lambda: Shade.DARK,
    "a class": lambda: Parsed,
    "a function": lambda: floats,
    "a list that holds itself": ring,
    "the same list twice": lambda: twice(lambda: [1, 2]),
    "the same dict twice": lambda: twice(lambda: {"a": floats(2)}),
    "the same object twice": lambda: twice(lambda: Parsed(1)),
    "the same array twice": lambda: twice(lambda: np.arange(3)),
    "deep nests": lambda: {"a": [({"b": [Box((floats(1),), {"c": [None]})]},)]},
    "a hundred levels": lambda: nested(100),
    "dates": lambda: datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    "decimals and fractions": lambda: [decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
    "a path": lambda: pathlib.PurePosixPath("/a/b"),
    "a pattern": lambda: re.compile("a+"),
    "a UUID": lambda: uuid.UUID(int=5),
    "an array of the array module": lambda: array.array("d", [1.0, 2.0]),
    "dtypes, devices and layouts": lambda: [torch.float32, torch.device("cpu"), torch.strided],
    "a generator of torch": lambda: torch.Generator().manual_seed(3),
    "an ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "ten thousand numbers": lambda: list(range(10_000)),
}


def with_added_attribute() -> Record:
    record = Record(1)
    record.extra = floats(2)  # type: ignore[attr-defined]
    return record


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else floats(1)


NUMPY: dict[str, Callable[[], Any]] = {
    "arrays": lambda: np.arange(6, dtype=np.int16).reshape(2, 3),
    "an array of no dimensions": lambda: np.array(2.5),
    "an array of no elements": lambda: np.empty((0, 3)),
    "an array in Fortran's order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a stepped array": lambda: np.arange(9)[::2],
    "a reversed array": lambda: np.arange(9)[::-1],
    "a read-only array": read_only,
    "a big-endian array": lambda: np.arange(3, dtype=">f8"),
    "array strings": lambda: np.array(["a", "bcd"]),
    "bytes of numpy": lambda: np.array([b"a", b"bcd"]),
    "array objects": lambda: np.array([None, {"a": 1}, "x"], dtype=object),
    "times": lambda: np.array(["2020-01-01"], dtype="datetime64[s]"),
    "a structured array": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f4", (2,))]),
    "a record array": lambda: np.zeros(2, dtype=[("a", "i4")]).view(np.recarray),
    "a large array": lambda: np.arange(200_000.0),
    "scalars": lambda: [
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
        np.str_("s"),
        np.bytes_(b"b"),
    ],
    "a numpy generator": lambda: np.random.default_rng(3).bit_generator.state,
}

ALL = {**TENSORS, **OBJECTS, **NUMPY}


def test_case_names_are_unique() -> None:
    assert len(ALL) == len(TENSORS) + len(OBJECTS) + len(NUMPY)


@pytest.mark.parametrize("kinds", ["tensors", "objects", "arrays"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_kind_of_batch_arrives_as_with_torch(
    loader_class: type, kinds: str, workers: int
) -> None:
    cases = {"tensors": TENSORS, "objects": OBJECTS, "arrays": NUMPY}[kinds]
    assert_same_outcomes(loader_class, cases, one_by_one, num_workers=workers, collate_fn=as_is)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_object_arrives_next_to_tensors(loader_class: type, workers: int) -> None:
    cases = {
        name: (lambda make=make: {"before": floats(3), "object": make(), "after": (floats(2), 5)})
        for name, make in {**OBJECTS, **NUMPY}.items()
    }
    assert_same_outcomes(loader_class, cases, one_by_one, num_workers=workers, collate_fn=as_is)


def test_every_kind_of_tensor_arrives_inside_an_object(loader_class: type) -> None:
    cases = {name: (lambda make=make: Parsed(make())) for name, make in TENSORS.items()}
    assert_same_outcomes(loader_class, cases, one_by_one, num_workers=1, collate_fn=as_is)
