# SPDX-License-Identifier: Apache-2.0
"""The user-visible parts of a loader's stream, recorded so that two loaders can be compared.

`describe` turns a batch into plain tuples that hold everything that must be equal: types, values
bit for bit, dtypes, strides, and which objects are the same one. A `Scenario` says how a loader is
built and driven; `record` plays it with one class and writes down every batch, error, warning and
the state of torch's, random's and numpy's generators after each step. Torch's recording is the
oracle.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import hashlib
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

# An iterable dataset whose worker cannot start raises errors without end.
STEPS_MAX = 40
NAMED = (type, torch.dtype, torch.layout, torch.device)
ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range)


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def describe(value: Any) -> Any:
    """The value as nested tuples of atoms, equal when a user could not distinguish the two
    values."""
    return _Describer().describe(value)


class _Describer:
    """Remembers the objects that one `describe` has met, to distinguish the same object from an
    equal one."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}
        self.kept_alive: list[Any] = []

    def describe(self, value: Any) -> Any:
        if isinstance(value, ATOMS):
            # repr keeps nan, the sign of zero and every bit of a float.
            return (type_name(value), repr(value))
        if isinstance(value, NAMED) or inspect.isroutine(value):
            return (type_name(value), getattr(value, "__qualname__", str(value)))
        if isinstance(value, np.generic):
            return (type_name(value), str(value.dtype), value.tobytes().hex())
        if isinstance(value, tuple):
            # Tuples of atoms may or may not be one object: users do not rely on that.
            return (type_name(value), tuple(self.describe(part) for part in value))
        if id(value) in self.met:
            return ("the same object as", self.met[id(value)])
        self.met[id(value)] = len(self.met)
        self.kept_alive.append(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, np.ndarray):
            return self.array(value)
        return (type_name(value), *self.contents(value))

    def contents(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, torch.UntypedStorage):
            return (value.nbytes(), bytes(value).hex())
        if isinstance(value, torch.Generator):
            return (value.get_state().numpy().tobytes().hex(),)
        if isinstance(value, BaseException):
            return (str(value), self.describe(value.args))
        if isinstance(value, collections.abc.Mapping):
            items = tuple((self.describe(key), self.describe(value[key])) for key in value)
            return (items, self.attributes(value))
        if isinstance(value, (set, frozenset)):
            return (tuple(sorted(map(repr, map(self.describe, value)))),)
        if isinstance(value, collections.abc.Sequence):
            return (tuple(self.describe(part) for part in value), self.attributes(value))
        attributes = self.attributes(value)
        return (attributes,) if attributes is not None else (repr(value),)

    def attributes(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return tuple((name, self.describe(getattr(value, name))) for name in names)
        if hasattr(value, "__dict__"):
            return tuple((name, self.describe(part)) for name, part in vars(value).items())
        return None

    def tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        traits = (
            type_name(value),
            str(value.dtype),
            str(value.layout),
            str(value.device),
            value.requires_grad,
            value.is_leaf,
        )
        if value.is_nested:
            return (*traits, *(self.tensor(part) for part in value.detach().unbind()))
        attributes = self.attributes(value) if type(value) is not torch.Tensor else None
        if value.layout is torch.sparse_coo:
            inner = value.detach()
            parts = (inner._indices(), inner._values())
            shape: tuple[Any, ...] = (tuple(value.shape), value.is_coalesced())
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (value.crow_indices(), value.col_indices(), value.detach().values())
            shape = (tuple(value.shape),)
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = (value.ccol_indices(), value.row_indices(), value.detach().values())
            shape = (tuple(value.shape),)
        else:
            shape = (tuple(value.shape), value.stride(), attributes)
            return (*traits, *shape, *self.strided(value.detach()))
        return (*traits, *shape, attributes, *(self.tensor(part) for part in parts))

    def strided(self, value: torch.Tensor) -> tuple[Any, ...]:
        if value.device.type == "meta":
            return ("no values",)
        plain = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        if plain.is_quantized:
            return (digest(plain.int_repr()), str(plain.qscheme()))
        return (digest(plain),)

    def array(self, value: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        flags = (value.flags.c_contiguous, value.flags.f_contiguous, value.flags.writeable)
        if value.dtype.hasobject:
            inside: Any = tuple(self.describe(part) for part in value.reshape(-1).tolist())
        else:
            inside = brief(value.tobytes())
        return (type_name(value), value.dtype.str, value.shape, flags, inside)


def digest(value: torch.Tensor) -> str:
    """The bytes of a tensor in order of its elements; long ones as a hash."""
    if value.numel() == 0:
        return ""
    if not value.is_contiguous():
        value = value.clone(memory_format=torch.contiguous_format)
    size = value.itemsize
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(value.untyped_storage(), value.storage_offset() * size, (value.numel() * size,))
    return brief(raw.numpy().tobytes())


def brief(content: bytes) -> str:
    return content.hex() if len(content) <= 256 else hashlib.sha256(content).hexdigest()


def error_text(error: BaseException) -> tuple[str, str, str]:
    """Type, first line and last line: a traceback between them names files of the loader."""
    text = re.sub(r"\bpid(\(s\))? [\d, ]+", "pid N", str(error))
    # A KeyError shows its text as a repr.
    lines = text.replace("\\n", "\n").strip().splitlines() or [""]
    return (type_name(error), lines[0], lines[-1])


def generator_states() -> tuple[str, str, str]:
    _, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = np.asarray(keys).tobytes() + repr(rest).encode()
    return (
        short_hash(torch.get_rng_state().numpy().tobytes()),
        short_hash(repr(random.getstate()).encode()),
        short_hash(numpy_state),
    )


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


class Recorder:
    """The notes of one run, in order. Each is followed by the generators' states at that moment."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.generator = generator

    def note(self, event: str, *details: Any) -> None:
        own = None if self.generator is None else digest(self.generator.get_state())
        self.notes.append((event, *details, generator_states(), own))

    def draw(self, iterator: Iterator[Any]) -> bool:
        """Takes one batch and notes it, or the error instead. Returns False at the epoch's end."""
        try:
            batch = next(iterator)
        except StopIteration as error:
            without_frames(error)
            self.note("end of the epoch", str(error).splitlines()[:1])
            return False
        except Exception as error:
            without_frames(error)
            self.note("error", error_text(error))
        else:
            self.note("batch", describe(batch))
        return True

    def draw_all(self, iterator: Iterator[Any]) -> None:
        for _ in range(STEPS_MAX):
            if not self.draw(iterator):
                return
        self.note("the epoch is not over")


def without_frames(error: BaseException) -> Any:
    """The error, no longer referring to its frames and the frames of its causes.

    Those frames refer to the error and to the iterator: a cycle that keeps workers alive.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def error_of(function: Callable[[], Any]) -> Exception:
    """The error that a call raises."""
    try:
        value = function()
    except Exception as error:
        return without_frames(error)  # type: ignore[no-any-return]
    raise AssertionError(f"an error was expected, but there came {describe(value)!r:.300}")


def next_error(iterator: Iterator[Any]) -> Exception:
    """The error that next() raises."""
    return error_of(lambda: next(iterator))


Drive = Callable[[Any, Recorder], None]


def whole_epochs(count: int) -> Drive:
    """Iterates `count` times to the end."""

    def drive(loader: Any, recorder: Recorder) -> None:
        for _ in range(count):
            iterator = iter(loader)
            recorder.note("iterator", len_or_error(iterator))
            recorder.draw_all(iterator)

    return drive


def len_or_error(sized: Any) -> Any:
    try:
        return len(sized)
    except TypeError as error:
        return error_text(error)


@dataclasses.dataclass(frozen=True, eq=False)
class Scenario:
    """How one loader is made and used. `options` gets the dataset, since samplers need it."""

    name: str
    dataset: Callable[[], Any]
    options: Callable[[Any], dict[str, Any]] | dict[str, Any]
    drive: Drive = whole_epochs(1)
    seed: int = 20260

    def make_options(self, dataset: Any) -> dict[str, Any]:
        return dict(self.options(dataset) if callable(self.options) else self.options)


# Warnings that are repeated with each action, which a loader may take less often than torch's.
PASSED_OVER = (
    "ComplexHalf support is experimental",  # each operation on such a dtype
    "use of fork() may lead to deadlocks",  # each process that is forked; from Python 3.12 on
)


def record(loader_class: type, scenario: Scenario) -> list[tuple[Any, ...]]:
    """Plays a scenario with one class and returns everything that a user could have seen."""
    torch.manual_seed(scenario.seed)
    random.seed(scenario.seed)
    np.random.seed(scenario.seed)
    dataset = scenario.dataset()
    options = scenario.make_options(dataset)
    recorder = Recorder(options.get("generator"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warned_always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            loader = loader_class(dataset, **options)
            recorder.note("loader")
            scenario.drive(loader, recorder)
        except Exception as error:
            without_frames(error)
            recorder.note("error outside of next()", error_text(error))
        finally:
            torch.set_warn_always(warned_always)
    for warning in caught:
        if not any(text in str(warning.message) for text in PASSED_OVER):
            recorder.notes.append(("warning", warning.category.__name__, str(warning.message)))
    return recorder.notes


_oracle: dict[Scenario, list[tuple[Any, ...]]] = {}


def assert_same_stream(loader_class: type, scenario: Scenario) -> None:
    """Fails with the first note in which the class differs from torch's loader.

    Torch's class itself is compared with an earlier run of it: that shows that a scenario repeats.
    """
    if scenario not in _oracle:
        _oracle[scenario] = record(torch.utils.data.DataLoader, scenario)
    want = _oracle[scenario]
    got = record(loader_class, scenario)
    for index, (seen, expected) in enumerate(zip(got, want, strict=False)):
        if seen[0] != expected[0]:
            difference = f"at note {index}: saw {seen!r:.600}, torch gives {expected!r:.600}"
        else:
            difference = first_difference(seen, expected, f"note {index} ({expected[0]})")
        assert difference is None, f"{scenario.name}: {difference}"
    longer = [
        f"{note!r:.300}"
        for note in (got if len(got) > len(want) else want)[min(len(got), len(want)) :]
    ]
    assert len(got) == len(want), (
        f"{scenario.name}: {len(got)} notes, torch has {len(want)}; in the longer one: {longer}"
    )


def first_difference(seen: Any, expected: Any, path: str) -> str | None:
    if isinstance(seen, tuple) and isinstance(expected, tuple) and len(seen) == len(expected):
        for index, (left, right) in enumerate(zip(seen, expected, strict=True)):
            difference = first_difference(left, right, f"{path}[{index}]")
            if difference is not None:
                return difference
        return None
    if seen == expected:
        return None
    return f"at {path}: saw {seen!r:.600}, torch gives {expected!r:.600}"
