# SPDX-License-Identifier: Apache-2.0
"""What can be told of the state of a dataset, to see whether fetching samples changes it.

Batches of the next epoch may be made before it begins, and be dropped when it begins otherwise than
expected. Nobody can tell only where fetching changes nothing that later samples read, and where
nobody but the worker can change what they read.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import dis
import enum
import functools
import pathlib
import pickle
import random
import re
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.worker.pickled_once import PrivateMap

_OBJECTS_MAX = 2000  # some milliseconds
_ITEMS_MAX = 64  # a longer container counts as data, which nobody changes
_BYTES_MAX = 4096  # a larger array, too

_COMPARED = (  # by value
    type(None), bool, int, float, complex, str, bytes, range, slice, type, type(Ellipsis),
    np.generic, np.dtype, torch.dtype, torch.device, torch.Size, enum.Enum, pathlib.PurePath,
    re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    types.ModuleType, types.BuiltinFunctionType, np.ufunc, property, weakref.ref,
    type(threading.Lock()), type(threading.RLock()), types.MethodWrapperType,
    types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_IMMUTABLE_MODULES = ("pyarrow.", "penstock.worker.shared_list.")  # whose objects cannot be changed
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_...; classes of Python are not immutable
_MUTABLE_HEAP_TYPE = _HEAP_TYPE | _IMMUTABLE_TYPE
_LIBRARY_FOLDERS = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class _OpaqueError(Exception):
    """Something is met whose changes cannot be seen from here."""


def fingerprint(*roots: Any) -> list[Any] | None:
    """Values that are equal later if nothing was changed that these objects lead to.

    Code is followed into the program's own functions and the globals that they name, not into
    installed packages. None when something could change unseen: memory shared with other processes,
    open files and other foreign handles, or more than can be looked at. Does not touch the items of
    long containers, whose pages a worker may share with the trainer.
    """
    walk = _Walk()
    try:
        for root in roots:
            walk.visit(root)
    except Exception:  # not ours alone: an object may refuse to be looked at, which says as little
        return None
    return walk.parts


class _Walk:
    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._seen: dict[int, Any] = {}  # by id, kept alive so that ids stay theirs

    def visit(self, value: Any) -> None:
        if isinstance(value, _COMPARED):
            self.parts.append(value)
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) + len(self.parts) > _OBJECTS_MAX:
            raise _OpaqueError
        self._look_into(value)

    def _visit_all(self, values: Iterator[Any]) -> None:
        for value in values:
            self.visit(value)

    def _look_into(self, value: Any) -> None:
        kind = type(value)
        self.parts.append(kind)
        if isinstance(value, torch.Tensor):
            self.parts.append(_of_tensor(value))
        elif isinstance(value, np.ndarray):
            self.parts.append(_of_array(value))
        elif isinstance(value, (torch.Generator, random.Random)) or kind.__module__.startswith(
            "numpy.random"
        ):
            self.parts.append(_of_generator(value))
        elif isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, types.MethodType):
            self._visit_all(iter((value.__func__, value.__self__)))
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__)
        elif isinstance(value, functools.partial):
            self._visit_all(iter((value.func, value.args, value.keywords)))
        elif isinstance(value, _CONTAINERS):
            self._look_into_container(value)
        elif not f"{kind.__module__}.".startswith(_IMMUTABLE_MODULES):
            self._look_into_object(value)

    def _look_into_container(self, value: Any) -> None:
        base: Any = next(base for base in _CONTAINERS if isinstance(value, base))
        count = base.__len__(value)  # a subclass may do anything in its own
        self.parts.append(count)
        if count <= _ITEMS_MAX:
            self._visit_all(base.__iter__(value))
            if isinstance(value, dict):
                self._visit_all(iter(dict.values(value)))
        if hasattr(value, "__dict__"):
            self._visit_all(iter(vars(value).values()))

    def _look_into_object(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "multiprocessing" or not _is_of_python(kind):
            raise _OpaqueError
        slots = [name for base in kind.__mro__ for name in _slots_of(base)]
        attributes = getattr(value, "__dict__", {})
        self._visit_all(iter(attributes))
        self._visit_all(iter(attributes.values()))
        self._visit_all(getattr(value, name, None) for name in slots)
        for base in kind.__mro__:
            for member in vars(base).values():
                if isinstance(member, types.FunctionType) and not _is_of_library(member):
                    self.visit(member)

    def _look_into_function(self, value: types.FunctionType) -> None:
        self._visit_all(iter(value.__defaults__ or ()))
        self._visit_all(iter((value.__kwdefaults__ or {}).values()))
        for cell in value.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:
                self.parts.append(None)  # not filled yet
        if _is_of_library(value):
            return
        for name in _globals_in(value.__code__):
            if name in value.__globals__:
                self.visit(value.__globals__[name])


def _is_of_library(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_LIBRARY_FOLDERS)


def _is_of_python(kind: type) -> bool:
    """Whether all that an object of this kind holds is in its attributes."""
    return all(
        base in (object, types.SimpleNamespace)
        or (base.__flags__ & _MUTABLE_HEAP_TYPE) == _HEAP_TYPE
        for base in kind.__mro__
    ) and (bool(kind.__dictoffset__) or any(_slots_of(base) for base in kind.__mro__))


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    slots = [slots] if isinstance(slots, str) else list(slots)
    hidden = [name for name in slots if name.startswith("__") and not name.endswith("__")]
    return [
        f"_{kind.__name__.lstrip('_')}{name}" if name in hidden else name
        for name in slots
        if name not in ("__dict__", "__weakref__")
    ]


@functools.cache
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    names = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*names, *(name for part in inner for name in _globals_in(part)))


def _of_tensor(value: torch.Tensor) -> Any:
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_shared():
        raise _OpaqueError
    if value.nbytes <= _BYTES_MAX:
        return (value.shape, value.dtype, bytes(value.detach().clone().untyped_storage()))
    if value.is_inference():
        raise _OpaqueError  # it does not count its changes
    return (value.shape, value._version)


def _of_array(value: Any) -> Any:
    owner = value
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    is_own = isinstance(owner.base, (type(None), bytes, PrivateMap)) or not owner.flags.writeable
    if value.dtype.hasobject or not is_own:
        raise _OpaqueError  # or memory of something else, which may be shared
    return (value.shape, value.tobytes() if value.nbytes <= _BYTES_MAX else None)


def _of_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    if isinstance(value, np.random.BitGenerator):
        return pickle.dumps(value.state)
    raise _OpaqueError
