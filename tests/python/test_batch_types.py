# SPDX-License-Identifier: Apache-2.0
"""Batches of the classes that programs have: sent without pickle, and of the same types there.

`_C.encode_value` and `_C.decode_value` use the code path of a pool's batches, in one piece.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from pool_datasets import CODE
from pool_processes import PoolProcesses, pool_of
from torchvision import tv_tensors
from transformers import BatchEncoding, BatchFeature

import penstock
from penstock import _C, DataLoader, Pool
from penstock.errors import UnsupportedError
from penstock.stream import batch_types


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """One worker, which serves each job of this module in a separate process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("types"), monkeypatch):
            opened.start_worker()
            yield opened


@dataclasses.dataclass
class Pair:
    image: Any
    label: int
    more: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    label: int


@attrs.define
class Slotted:
    image: Any
    label: int


class Named(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


class Wrapped(collections.UserDict):  # type: ignore[type-arg]
    """A mapping as Hugging Face's."""


class Ragged:
    """A class whose content penstock cannot find by itself."""

    def __init__(self, values: torch.Tensor, sizes: list[int]) -> None:
        self._values, self._sizes = values, sizes
        self._cache = lambda: None  # cannot be sent

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ragged)
            and torch.equal(self._values, other._values)
            and self._sizes == other._sizes
        )


class Custom(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        return Custom, ()


class Colour(enum.Enum):
    RED = "red"


class Reading(enum.Flag):
    LEFT = 1
    RIGHT = 2


def round_trip(value: object) -> Any:
    return _C.decode_value(_C.encode_value(value))


def is_same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        equal = a.dtype == b.dtype and torch.equal(a.as_subclass(torch.Tensor), b)
        return bool(equal) and is_same(dict(vars(a)), dict(vars(b)))
    if isinstance(a, (dict, collections.UserDict)):
        if list(a) != list(b) or not all(is_same(a[key], b[key]) for key in a):
            return False
        if type(a) is dict or isinstance(a, collections.UserDict):
            return True
        return is_same(dict(getattr(a, "__dict__", {})), dict(getattr(b, "__dict__", {})))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if dataclasses.is_dataclass(a) or attrs.has(type(a)):
        fields = dataclasses.fields if dataclasses.is_dataclass(a) else attrs.fields
        names = [one.name for one in fields(type(a))]  # type: ignore[operator]
        return all(is_same(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)


def image() -> torch.Tensor:
    return torch.arange(24.0).view(2, 3, 4)


KNOWN: dict[str, Callable[[], Any]] = {
    "OrderedDict": lambda: collections.OrderedDict(b=image(), a=1),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [image()]}),
    "defaultdict without factory": lambda: collections.defaultdict(None, {1: 2}),
    "deque": lambda: collections.deque([1, image()], maxlen=4),
    "BatchEncoding": lambda: BatchEncoding({"input_ids": torch.arange(6).view(2, 3), "n": [1]}),
    "BatchFeature": lambda: BatchFeature({"pixel_values": image()}),
    "tv_tensors.Image": lambda: tv_tensors.Image(image()),
    "tv_tensors.BoundingBoxes": lambda: tv_tensors.BoundingBoxes(
        torch.tensor([[1.0, 2, 3, 4]]), format="XYWH", canvas_size=(30, 40)
    ),
    "complex": lambda: 1 - 2j,
    "set": lambda: {1, "a", (2, 3)},
    "frozenset": lambda: frozenset({1, 2}),
    "bytearray": lambda: bytearray(b"\0a"),
    "range": lambda: range(3, 20, 4),
    "slice": lambda: slice(1, None, 2),
    "Decimal": lambda: decimal.Decimal("1.50"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "date": lambda: datetime.date(2026, 2, 28),
    "datetime": lambda: datetime.datetime(2026, 2, 28, 1, 2, 3, 4, datetime.timezone.utc),
    "time": lambda: datetime.time(1, 2, 3),
    "timedelta": lambda: datetime.timedelta(3, 4, 5),
    "UUID": lambda: uuid.UUID(int=7),
    "Path": lambda: pathlib.Path("a/b"),
    "Size": lambda: torch.Size([1, 2]),
    "nested": lambda: {"a": [collections.OrderedDict(x=BatchEncoding({"y": image()}))]},
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_types_are_sent_without_trust(name: str) -> None:
    value = KNOWN[name]()
    assert is_same(round_trip(value), value)


def test_torch_geometric_graphs_are_sent_without_trust() -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    graphs = [
        geometric.Data(x=torch.rand(n, 3), edge_index=torch.tensor([[0, 1], [1, 0]]), y=n)
        for n in (2, 3)
    ]
    for value in (graphs[0], geometric.Batch.from_data_list(graphs)):
        got = round_trip(value)
        assert type(got) is type(value) and got.keys() == value.keys()
        assert all(is_same(got[key], value[key]) for key in value.keys())  # noqa: SIM118
    assert got.num_graphs == 2
    assert torch.equal(got.get_example(1).x, graphs[1].x)


REGISTERED: dict[str, Callable[[], Any]] = {
    "dataclass": lambda: Pair(image(), 3),
    "frozen dataclass with slots": lambda: Frozen(image(), 3),
    "attrs": lambda: Slotted(image(), 3),
    "dict": lambda: Named(a=image()),
    "UserDict": lambda: Wrapped({"a": image()}),
    "Enum": lambda: Colour.RED,
}


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_classes_are_sent_and_others_refused(name: str) -> None:
    value = REGISTERED[name]()
    with pytest.raises(UnsupportedError, match=r"call penstock\.register_batch_type\(\) for its"):
        _C.encode_value(value)
    penstock.register_batch_type(type(value))
    encoded = _C.encode_value(value)
    assert is_same(_C.decode_value(encoded), value)
    batch_types._registered.clear()
    with pytest.raises(UnsupportedError, match=r"has not registered; call penstock\.register_"):
        _C.decode_value(encoded)


def test_attributes_and_missing_fields_are_kept() -> None:
    penstock.register_batch_type(Pair)
    penstock.register_batch_type(Named)
    pair = Pair(image(), 3)
    pair.note = "extra"  # type: ignore[attr-defined]
    del pair.more
    got = round_trip(pair)
    assert got.note == "extra" and not hasattr(got, "more")
    named = Named(a=1)
    named.source = "file"
    assert round_trip(named).source == "file"


def test_functions_take_classes_apart() -> None:
    penstock.register_batch_type(
        Ragged,
        lambda ragged: ([ragged._values], ragged._sizes),
        lambda children, sizes: Ragged(children[0], sizes),
    )
    value = [Ragged(image(), [1, 2])]
    assert round_trip(value) == value


def test_pytrees_of_torch_are_registered() -> None:
    from torch.utils import _pytree

    with pytest.raises(UnsupportedError, match="Ragged, which pool workers do not send"):
        _C.encode_value(Ragged(image(), [1]))
    _pytree.register_pytree_node(
        Ragged,
        lambda ragged: ([ragged._values], ragged._sizes),
        lambda children, sizes: Ragged(list(children)[0], sizes),
    )
    batch_types._found.clear()
    try:
        assert round_trip(Ragged(image(), [1])) == Ragged(image(), [1])
    finally:
        _pytree._deregister_pytree_node(Ragged)
        batch_types._found.clear()


def test_pytree_with_code_in_its_context_is_refused_by_its_class() -> None:
    from torch.utils import _pytree

    _pytree.register_pytree_node(
        Ragged,
        lambda ragged: ([ragged._values], {"make": [Ragged]}),
        lambda children, context: context["make"][0](*children, []),
    )
    batch_types._found.clear()
    try:
        with pytest.raises(UnsupportedError, match="Ragged, which pool workers do not send"):
            _C.encode_value({"a": Ragged(image(), [1])})
    finally:
        _pytree._deregister_pytree_node(Ragged)
        batch_types._found.clear()


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (Custom(a=1), "Custom"),
        (Reading.LEFT | Reading.RIGHT, "Reading"),
        (collections.defaultdict(lambda: 1), "defaultdict"),
        (datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))), "time"),
        (Pair(1, 1), "Pair"),
        ([collections.OrderedDict(a=object())], "object"),
    ],
)
def test_other_objects_are_refused_by_name(value: Any, seen: str) -> None:
    with pytest.raises(UnsupportedError, match=seen):
        _C.encode_value(value)


def test_registration_needs_a_class_and_both_functions() -> None:
    with pytest.raises(TypeError, match="cls must be a class, got 3"):
        penstock.register_batch_type(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="together"):
        penstock.register_batch_type(Ragged, lambda ragged: ([], None))
    for cls in (Ragged, Custom):
        with pytest.raises(TypeError, match=f"{cls.__name__} must be a dataclass.*pass flatten"):
            penstock.register_batch_type(cls)


def test_content_that_does_not_fit_is_an_error() -> None:
    penstock.register_batch_type(Pair)
    batch_types._registered[f"{__name__}:Named"] = batch_types.RegisteredType(
        Named, lambda one: ([], None), lambda children, context: children[0]
    )
    with pytest.raises(UnsupportedError, match="does not fit it"):
        round_trip(Named())


def test_property_of_a_class_is_not_set() -> None:
    ran = []

    @dataclasses.dataclass
    class Watched:
        label: int

        @property
        def other(self) -> int:
            return 0

        @other.setter
        def other(self, value: int) -> None:
            ran.append(value)

    penstock.register_batch_type(Watched)
    flat = batch_types._registered[f"{__name__}:{Watched.__qualname__}"]
    with pytest.raises(ValueError, match="other is no field"):
        flat.unflatten([{"label": 1, "other": 2}], None)
    assert ran == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("builtins:bytearray", (1 << 40,)),
        ("torchvision.tv_tensors._image:Image", ({"requires_grad": True}, torch.zeros(3, 2, 2))),
        ("builtins:complex", ([1, 2, 3],)),
        ("decimal:Decimal", ("one",)),
        ("collections:OrderedDict", (None, 3)),
    ],
)
def test_content_of_a_hostile_worker_is_refused(name: str, values: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"the class '{name}' does not fit it"):
        batch_types.make(name, values, False)


def test_no_package_is_imported_for_a_worker_without_trust() -> None:
    name = "torch_geometric.data.data:Data"
    program = f"""
import sys
from penstock import _C, errors
from penstock.stream import batch_types
try:
    batch_types.make("{name}", (None, {{}}, {{}}), False)
except errors.UnsupportedError as error:
    print(error, "torch_geometric" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"of the class '{name}', which this process has not registered" in done.stdout, done
    assert done.stdout.endswith("program False\n")


def test_equal_hashes_of_a_set_are_bounded() -> None:
    colliding = {number * (2**61 - 1) for number in range(65)}
    with pytest.raises(UnsupportedError, match="the same hash"):
        round_trip(colliding)


class Containers(torch.utils.data.Dataset[Any]):
    """Samples of one container; ``collate_fn`` makes batches of it."""

    def __init__(self, make: Callable[[torch.Tensor], Any], count: int = 12) -> None:
        self.make = make
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index)

    def collate(self, samples: list[torch.Tensor]) -> Any:
        return self.make(torch.stack(samples))


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "OrderedDict": lambda rows: collections.OrderedDict(rows=rows),
    "BatchEncoding": lambda rows: BatchEncoding({"input_ids": rows}),
    "Pair": lambda rows: Pair(rows, 3),
    "nested": lambda rows: [{"a": (Slotted(rows, 1), Colour.RED)}],
}


def make_each(rows: torch.Tensor) -> Any:
    """Each container in turn, for two batches."""
    return [*CONTAINERS.values()][int(rows[0, 0]) // 8](rows)


def batches_of_each() -> Containers:
    """Two batches of four for each container, in one job."""
    return Containers(make_each, count=8 * len(CONTAINERS))


PICKLED: dict[str, Callable[[torch.Tensor], Any]] = {
    "key": lambda rows: {Colour.RED: rows},
    "function": lambda rows: collections.defaultdict(dict, {"a": [rows, len]}),
    "twice": lambda rows: [collections.OrderedDict(rows=rows)] * 2,
}


@pytest.mark.parametrize("name", PICKLED)
def test_other_batches_are_pickled_as_before(name: str) -> None:
    dataset = Containers(PICKLED[name])
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "collate_fn": dataset.collate}
    options["multiprocessing_context"] = "fork"
    ours = list(DataLoader(dataset, **options))
    assert is_same(ours, list(torch.utils.data.DataLoader(dataset, **options)))
    if name == "twice":
        assert all(first is second for first, second in ours)


@pytest.fixture
def no_pickled_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.worker import batch_pickle

    def refuse(*_: Any) -> Any:
        raise AssertionError("a batch was pickled")

    monkeypatch.setattr(batch_pickle, "loads", refuse)


@pytest.mark.usefixtures("no_pickled_batches")
@pytest.mark.parametrize("name", CONTAINERS)
def test_local_batches_have_the_types_of_torchs(name: str) -> None:
    dataset = Containers(CONTAINERS[name])
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "collate_fn": dataset.collate,
        "multiprocessing_context": "fork",
    }
    theirs = list(torch.utils.data.DataLoader(dataset, **options))
    ours = list(DataLoader(dataset, **options))
    assert is_same(ours, theirs)


@pytest.mark.usefixtures("no_pickled_batches")
def test_batches_of_spawned_workers_have_the_types_of_torchs() -> None:
    pytest.importorskip("cloudpickle")
    dataset = batches_of_each()
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "collate_fn": dataset.collate,
        "multiprocessing_context": "spawn",
    }
    theirs = list(torch.utils.data.DataLoader(dataset, **options))
    assert len({type(batch) for batch in theirs}) == len(CONTAINERS)
    assert is_same(list(DataLoader(dataset, **options)), theirs)


def test_pool_sends_containers_without_trust(pool: PoolProcesses) -> None:
    for cls in (Pair, Slotted, Colour):
        penstock.register_batch_type(cls)
    dataset = batches_of_each()
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": dataset.collate}
    loader = DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), **options)
    expected = list(torch.utils.data.DataLoader(dataset, **options))
    assert len({type(batch) for batch in expected}) == len(CONTAINERS)
    assert is_same(list(loader), expected)


def test_registration_travels_with_the_job(pool: PoolProcesses) -> None:
    """The worker knows how to take apart a class that only the program has."""
    penstock.register_batch_type(
        Ragged,
        lambda ragged: ([ragged._values], ragged._sizes),
        lambda children, sizes: Ragged(children[0], sizes),
    )
    dataset = Containers(lambda rows: Ragged(rows, [1, 2]))
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": dataset.collate}
    batches = list(DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), **options))
    assert batches == list(torch.utils.data.DataLoader(dataset, **options))


class Registering(Containers):
    """Has its worker send a class that the trainer's program has not registered."""

    def __getitem__(self, index: int) -> torch.Tensor:
        penstock.register_batch_type(Pair)
        return super().__getitem__(index)


def test_pools_worker_chooses_no_class_without_trust(pool: PoolProcesses) -> None:
    dataset = Registering(CONTAINERS["Pair"])
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": dataset.collate}
    address = {"address": pool.endpoint, "code_paths": [CODE]}
    loader = DataLoader(dataset, pool=Pool(**address), **options)
    with pytest.raises(UnsupportedError, match=r":Pair', which this process has not registered"):
        next(iter(loader))
    trusting = DataLoader(dataset, pool=Pool(**address, trust_workers=True), **options)
    assert is_same(list(trusting), list(torch.utils.data.DataLoader(dataset, **options)))


def test_pickled_objects_keep_pickles_results() -> None:
    """A local worker's objects are what pickle would have made of them."""
    for make in (*KNOWN.values(), *REGISTERED.values()):
        value = make()
        flat = batch_types.flatten(value, True)
        if flat is None:
            continue
        name, values = flat
        assert is_same(batch_types.make(name, values, True), pickle.loads(pickle.dumps(value)))
