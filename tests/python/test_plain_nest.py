# SPDX-License-Identifier: Apache-2.0
"""Values as a pool worker sends them: no pickle, exact types, and no reference followed blindly.

`_C.encode_value` and `_C.decode_value` use the code path of batches, in one piece.
"""

from __future__ import annotations

import collections
import enum
import random
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock import _C
from penstock.errors import PenstockError, UnsupportedError

SEED = 20


class Point(NamedTuple):
    x: Any
    y: Any


class Holder:
    class Inner(NamedTuple):
        value: Any


Pair = collections.namedtuple("Pair", ["left", "right"])


def round_trip(value: object) -> Any:
    return _C.decode_value(_C.encode_value(value))


def refusal(value: object, name: str = "batch") -> str:
    with pytest.raises(UnsupportedError) as caught:
        _C.encode_value(value, name)
    return str(caught.value)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_same(a: Any, b: Any) -> None:
    """Bit-for-bit equal, and of the same types all the way down."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert bits(a) == bits(b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.dtype.str == b.dtype.str and a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert list(map(type, a)) == list(map(type, b))
        for own, other in zip(a.values(), b.values(), strict=True):
            assert_same(own, other)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for own, other in zip(a, b, strict=True):
            assert_same(own, other)
    else:
        assert a == b or (a != a and b != b)


# ---- Round trips


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**63) - 1,
        2**64,
        255 << 60,
        -(1 << 127),
        3**2000,
        1.5,
        float("inf"),
        "",
        "text é \U0001f600 \0 end",
        "lone \udc80 surrogate \ud800",
        b"",
        b"\0\xff",
        [],
        (),
        {},
        [1, [2, [3, ()]], {"a": (None, False)}],
        {1: "int", "1": "str", b"1": "bytes", (1, "a"): "tuple", None: 0, 2.5: 1, 2**70: 2},
        Point(1, Pair([2], {"a": Holder.Inner("deep")})),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_values_round_trip(value: object) -> None:
    assert_same(round_trip(value), value)


def test_nan_and_minus_zero_round_trip() -> None:
    assert str(round_trip([float("nan"), -0.0])) == "[nan, -0.0]"


DTYPES = [
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"),
    *(np.longdouble, np.clongdouble, "q", "Q"),
    *(">i2", ">u4", ">i8", ">f2", ">f8", ">c16"),
    *("U5", ">U5", "S3", "V7", "M8[ns]", "m8[25s]", ">M8[D]", "M8"),
]
SHAPES = [(), (5,), (0,), (2, 3), (2, 0, 3), (1, 1, 4)]


def filled(dtype: Any, shape: tuple[int, ...]) -> Any:
    kind = np.dtype(dtype).kind
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    if kind == "V":
        return np.frombuffer(bytes(range(7 * numbers.size)), dtype).reshape(shape).copy()
    return numbers.astype(str if kind in "US" else "i8").astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_plain_dtype_round_trip(dtype: Any) -> None:
    for shape in SHAPES:
        array = filled(dtype, shape)
        again = round_trip(array)
        assert type(again) is np.ndarray and again.flags.writeable
        assert again.dtype == array.dtype and again.dtype.str == array.dtype.str
        assert again.shape == array.shape and again.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["f4", ">f4", "U5"])
def test_arrays_in_any_layout_round_trip(dtype: str) -> None:
    whole = filled(dtype, (6, 8, 4))
    read_only = whole.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + whole.tobytes(), dtype, offset=1).reshape(whole.shape)
    for array in (
        whole[::-1],
        whole[:, ::2, 1:3],
        whole.transpose(2, 0, 1),
        np.asfortranarray(whole),
        whole[:1, :1, :1][::-1],
        whole[3:3, ::-2],
        np.broadcast_to(whole[0, 0], (3, 4)),
        read_only,
        unaligned,
    ):
        again = round_trip(array)
        assert again.flags.writeable
        assert again.dtype.str == array.dtype.str and again.shape == array.shape
        assert again.tobytes() == array.tobytes()


def test_fortran_order_is_preserved() -> None:
    for dtype in ("f4", "U5"):
        assert round_trip(np.asfortranarray(filled(dtype, (3, 4)))).flags.f_contiguous


def test_slice_sends_only_its_own_elements() -> None:
    secret = np.zeros((1000, 1000))
    assert len(_C.encode_value(secret[::500, ::500])) < 1000


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.dtype(name).type(1) for name in ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8")),
        np.longdouble(1) / 3,
        np.clongdouble(2 + 1j),
        np.datetime64("2020-02-03T04:05:06.789"),
        np.datetime64("NaT"),
        np.timedelta64(5, "h"),
        np.str_("text"),
        np.str_(""),
        np.str_("ends in a zero \0"),
        np.bytes_(b"bytes\0"),
        np.bytes_(b""),
        np.void(b"abc"),
        np.float32("nan"),
    ],
    ids=lambda scalar: f"{type(scalar).__name__}-{scalar!s:.8}",
)
def test_numpy_scalars_round_trip(scalar: np.generic) -> None:
    again = round_trip({"a": scalar})["a"]
    assert type(again) is type(scalar)
    assert again.dtype == scalar.dtype and again.tobytes() == scalar.tobytes()
    assert str(again) == str(scalar)


def test_numpy_scalar_key_round_trips() -> None:
    assert round_trip({np.int64(3): "three"}) == {3: "three"}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint16, torch.float8_e4m3fn],
)
def test_tensors_round_trip(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (0, 2), (2, 3)):
        tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
        assert_same(round_trip([tensor])[0], tensor)
    strided = torch.arange(24).reshape(4, 6)[:, ::2].t()
    assert torch.equal(round_trip(strided), strided)


def test_repeated_tensor_is_sent_once_and_shares_memory() -> None:
    tensor, array, text = torch.zeros(1000), np.zeros(1000), np.array(["a"] * 1000)
    assert len(_C.encode_value([tensor] * 3 + [array] * 3 + [text] * 3)) < 17_000
    first, _, second = round_trip([tensor] * 3)
    assert first is second
    for value in (array, text):
        first, second = round_trip([value, value])
        assert first.dtype == second.dtype == value.dtype
        first[0] = second[1] = 7
        assert first[1] == second[0] == first[0]


def test_repeated_container_is_sent_twice() -> None:
    inner = [1]
    first, second = round_trip([inner, inner])
    assert first == second == [1] and first is not second


def test_array_keeps_batch_memory_alive() -> None:
    arrays = [
        round_trip(filled(dtype, (1000,))) for dtype in ("f8", "U5", ">f8") for _ in range(20)
    ]
    for array in arrays:
        assert array.tobytes() == filled(array.dtype, (1000,)).tobytes()


def test_generator_states_round_trip() -> None:
    generator = torch.Generator().manual_seed(3)
    numpy_generator = np.random.default_rng(4)  # its state has integers of 128 bits
    own = random.Random(5)
    state = {
        "torch": generator.get_state(),
        "random": own.getstate(),
        "legacy": np.random.RandomState(6).get_state(),
        "numpy": numpy_generator.bit_generator.state,
    }
    again = round_trip(state)
    assert_same(again, state)
    other = torch.Generator()
    other.set_state(again["torch"])
    assert torch.equal(torch.rand(4, generator=other), torch.rand(4, generator=generator))
    second = random.Random()
    second.setstate(again["random"])
    assert second.random() == own.random()
    third = np.random.default_rng()
    third.bit_generator.state = again["numpy"]
    assert third.random() == numpy_generator.random()


# ---- Rejected values, and the error messages


class Text(str):
    pass


class Colour(enum.IntEnum):
    RED = 1


class Extended(Pair):
    pass


def with_an_attribute() -> Any:
    value = Extended(1, 2)
    value.note = "lost"
    return value


def sparse_with_an_attribute() -> Any:
    value: Any = torch.zeros(2, 2).to_sparse()
    value.note = "lost"
    return value


def local_tuple() -> Any:
    class Local(NamedTuple):
        x: int

    return Local(1)


ADVICE = (
    ", which pool workers do not send; return tensors, numpy arrays, numbers, str, bytes, "
    "None and dicts, lists, tuples and named tuples of them, call penstock.register_batch_type() "
    "for its class, or pass trust_workers=True to accept pickled objects from the pool's workers"
)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (Text("a"), f"a {__name__}.Text"),
        (object, "a type"),
        (ValueError("no"), "a ValueError"),
        (1 << (8 * 4096), "an int of 4097 bytes, above 4096"),
        (torch.nn.Parameter(torch.zeros(1)), "a torch.nn.parameter.Parameter"),
        (torch.zeros(1, requires_grad=True), "a torch.Tensor that requires grad"),
        (sparse_with_an_attribute(), "a torch.Tensor of the layout Sparse"),
        (torch.zeros(2, device="meta"), "a torch.Tensor on meta"),
        (
            torch.zeros(2, dtype=torch.complex64).conj(),
            "a torch.Tensor that is not a plain tensor of",
        ),
        (np.array([object()]), "a numpy.ndarray of dtype object"),
        (np.zeros(2, "i4,f4"), "a numpy.ndarray of dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2, [("a", "O")]), "a numpy.ndarray of dtype [('a', 'O')]"),
        (np.zeros(1, "i4,f4")[0], "a numpy.void of dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2).view(np.recarray), "a numpy.rec.recarray"),
        (np.ma.zeros(2), "a numpy.ma.MaskedArray"),
        (
            with_an_attribute(),
            f"a named tuple, {__name__}.Extended, which has attributes in addition",
        ),
        (local_tuple(), f"a named tuple, {__name__}.local_tuple.<locals>.Local, whose class was"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_unsupported_value_error_names_its_path(value: object, seen: str) -> None:
    message = refusal({"meta": [1, 2, (value,)]})
    assert message.startswith(f"batch['meta'][2][0] is {seen}")
    assert message.endswith(ADVICE)


def test_error_paths_cover_fields_keys_and_root() -> None:
    assert refusal(Point(1, [object()])).startswith("batch.y[0] is a object,")
    assert refusal({("a", Text("b")): 1}).startswith("a key in batch[('a', 'b')][1] is a")
    assert refusal({frozenset(): 1}).startswith("a key in batch[frozenset()] is a frozenset as a")
    assert refusal(object(), "state").startswith("state is a object,")
    assert refusal({"é" * 100: object()}).startswith(f"batch['{'é' * 59}...] is a object,")
    assert refusal({"\udc80\n": object()}).startswith("batch['\\udc80\\n'] is a object,")


@pytest.mark.parametrize("key", [torch.zeros(1), Point(1, 2), (Point(1, 2),)])
def test_tensor_and_named_tuple_keys_are_rejected(key: object) -> None:
    assert " as a key, which" in refusal({key: 1})


def test_self_containing_container_is_rejected() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    assert refusal(loop).startswith("batch[1]['again'] is a list that contains itself, which")
    beside: dict[str, Any] = {}
    beside["a"] = beside
    assert refusal(beside).startswith("batch['a'] is a dict that contains itself")


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_deeper_than_64_levels_is_rejected() -> None:
    deepest = nested(63)
    assert round_trip(deepest) == deepest
    assert "nested deeper than 64 levels" in refusal(nested(64))
    assert "nested deeper than 64 levels" in refusal(nested(10_000))


# ---- Named tuples are made from the trainer's imported classes, by tuple alone


def of_class(module: str, name: str, count: int = 2) -> bytes:
    """A value that claims to be a named tuple of that class, of `count` values."""
    text = f"{module}:{name}".encode()
    stand_in = "stand_in:" + "N" * (len(text) - len("stand_in:"))
    stand_in_module, _, stand_in_name = stand_in.partition(":")
    cls = collections.namedtuple(stand_in_name, [f"f{index}" for index in range(count)])
    cls.__module__ = stand_in_module
    return _C.encode_value(cls(*range(count))).replace(stand_in.encode(), text)


def test_named_tuple_of_imported_class_is_decoded() -> None:
    assert _C.decode_value(of_class(__name__, "Point")) == Point(0, 1)
    assert _C.decode_value(of_class(__name__, "Holder.Inner", 1)) == Holder.Inner(0)


@pytest.mark.parametrize(
    ("module", "name", "count", "why"),
    [
        ("absent_module", "Point", 2, "is in no module that this process has imported"),
        (__name__, "AbsentClass", 2, "is in no module that this process has imported"),
        (__name__, "Holder.Absent", 2, "is in no module that this process has imported"),
        (__name__, "round_trip.__globals__", 2, "is in no module that this process has imported"),
        (__name__, "Point.", 2, "is in no module that this process has imported"),
        (__name__, "Point", 3, "3 values where the class here has 2 fields"),
        (__name__, "round_trip", 2, "is not a class of named tuples here"),
        (__name__, "Holder", 2, "is not a class of named tuples here"),
        ("builtins", "tuple", 2, "is not a class of named tuples here"),
        ("builtins", "exec", 1, "is not a class of named tuples here"),
        ("subprocess", "Popen", 2, "is not a class of named tuples here"),
        ("torch", "Size", 2, "is not a class of named tuples here"),
        ("time", "struct_time", 9, "is not a class of named tuples here"),
        ("ast", "Constant", 2, "is not a class of named tuples here"),
    ],
)
def test_name_of_no_named_tuple_class_is_rejected(
    module: str, name: str, count: int, why: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        _C.decode_value(of_class(module, name, count))
    assert f"'{module}:{name}'" in str(caught.value) and why in str(caught.value)
    assert "import the module that defines it in the trainer" in str(caught.value)


def test_decoding_runs_no_code_of_the_named_class(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            called.append(name)
            return super().__getattribute__(name)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            called.append("__call__")
            return super().__call__(*args, **kwargs)

    class Watched(Pair, metaclass=Meta):
        def __new__(cls, *args: Any) -> Any:
            called.append("__new__")
            return super().__new__(cls, *args)

        def __init__(self, *args: Any) -> None:
            called.append("__init__")

        def __hash__(self) -> int:
            called.append("__hash__")
            return 0

        def __eq__(self, other: object) -> bool:
            called.append("__eq__")
            return True

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            called.append(name)
            return super().__getattribute__(name)

    module = Lazy("lazy_module")
    types.ModuleType.__getattribute__(module, "__dict__")["Watched"] = Watched
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    data = of_class("lazy_module", "Watched")
    missing = of_class("lazy_module", "Missing")
    called.clear()
    again = _C.decode_value(data)
    with pytest.raises(UnsupportedError):
        _C.decode_value(missing)
    assert called == []
    assert type(again) is Watched and tuple(again) == (0, 1)


def test_class_with_finalizer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalized(Pair):
        def __del__(self) -> None:
            raise AssertionError

    monkeypatch.setattr(sys.modules[__name__], "Finalized", Finalized, raising=False)
    with pytest.raises(UnsupportedError, match="not a class of named tuples here"):
        _C.decode_value(of_class(__name__, "Finalized"))


# ---- Malformed bytes


def samples() -> list[bytes]:
    values = [
        None,
        {"a": [1, 2.5, "text", b"bytes", 2**80], "b": (Point(1, 2), None, True)},
        [torch.arange(5), np.arange(6).reshape(2, 3), np.array(["ab", "c"]), torch.zeros(0, 2)],
        {
            "s": np.float32(2),
            "d": np.datetime64("2020-01-01"),
            "u": np.str_("ab"),
            "v": np.void(b"a"),
        },
    ]
    return [_C.encode_value(value) for value in values]


def read(data: bytes) -> None:
    try:
        value = _C.decode_value(data)
    except (PenstockError, MemoryError):
        return
    repr(value)


def test_truncated_or_extended_bytes_are_rejected() -> None:
    for data in samples():
        for length in range(len(data)):
            with pytest.raises(PenstockError):
                _C.decode_value(data[:length])
        with pytest.raises(PenstockError):
            _C.decode_value(data + b"\0")


def test_bit_flip_yields_error_or_value() -> None:
    for data in samples():
        damaged = bytearray(data)
        for bit in range(8 * len(data)):
            damaged[bit // 8] ^= 1 << bit % 8
            read(bytes(damaged))
            damaged[bit // 8] ^= 1 << bit % 8


def test_random_damage_yields_error_or_value() -> None:
    rng = random.Random(SEED)
    originals = samples()
    for _ in range(4000):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.randint(2, 8)):
            place = rng.randrange(len(data))
            data[place] = rng.choice([rng.randrange(256), rng.randrange(16), data[place - 1]])
        read(bytes(data))


@pytest.mark.parametrize(
    ("honest", "wanted", "claimed"),
    [
        (np.array(["ab", "cd"]), b"<U2", b"<U3"),  # not the elements' size
        (np.array(["ab", "cd"]), b"<U2", b"<U0"),
        (np.array(["ab", "cd"]), b"<U2", b"|O8"),
        (np.array(["ab", "cd"]), b"<U2", b"<i8"),  # this one is well formed
        (np.zeros(3, ">i4"), b">i4", b">f4"),  # and this one
        (np.float32(1), b"<f4", b"|O4"),
        (np.float32(1), b"<f4", b"<f8"),
        (np.float16(1), b"<f2", b"<M8"),
        ("text", b"text", b"\xff\xfe\xfd\xfc"),
        (np.str_("a"), b"a\0\0\0", b"\xff\xff\xff\xff"),
        (np.array(["z"]), b"z\0\0\0", b"\0\0\x11\0"),  # above the last character
        (np.array(["z"], ">U1"), b"\0\0\0z", b"\0\x11\0\0"),
    ],
)
def test_mismatched_dtype_or_text_is_malformed(
    honest: object, wanted: bytes, claimed: bytes
) -> None:
    data = _C.encode_value(honest)
    assert data.count(wanted) == 1
    data = data.replace(wanted, claimed)
    if claimed in (b"<i8", b">f4"):
        assert _C.decode_value(data).dtype.str == claimed.decode()
        return
    with pytest.raises(PenstockError, match="malformed"):
        _C.decode_value(data)


def test_unhashable_key_is_rejected() -> None:
    data = _C.encode_value({(): 1})
    tuple_tag, list_tag = b"\x08\0\0\0\0", b"\x07\0\0\0\0"
    assert data.count(tuple_tag) == 1
    with pytest.raises(PenstockError, match="a key cannot be hashed"):
        _C.decode_value(data.replace(tuple_tag, list_tag))


def test_colliding_dict_keys_are_rejected() -> None:
    """Each is compared with all earlier ones: a million such keys took the trainer hours."""
    data = _C.encode_value({number * (2**61 - 1): None for number in range(1, 200)})
    with pytest.raises(PenstockError, match="too many keys have the same hash"):
        _C.decode_value(data)


def test_large_dictionaries_round_trip() -> None:
    inner = {index: str(index) for index in range(5000)}
    value = {"outer": inner, **{f"key {index}": index for index in range(5000)}}
    assert _C.decode_value(_C.encode_value(value)) == value


def test_pickle_record_is_rejected() -> None:
    data = _C.encode_value(b"\x80\x05N.")
    length = (4).to_bytes(4, "little")
    bytes_tag, pickle_tag = b"\x06" + length + b"\x80\x05N.", b"\x0b" + length + b"\x80\x05N."
    assert data.count(bytes_tag) == 1
    with pytest.raises(UnsupportedError, match="trust_workers=True"):
        _C.decode_value(data.replace(bytes_tag, pickle_tag))
