# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a dataset's state, which detects whether fetching samples changes it.

Batches of the next epoch may be made before it starts, and be dropped if it starts differently than
expected. That is unobservable only if fetching changes no data that later samples read, and if only
the worker can change the data that they read.

All data is read, at any size, since every cheaper sign of a write can be bypassed: a tensor does
not count writes through numpy's view of it, a read-only array may have a writable view, and only
some kernels report which pages a process has written to. Inspecting a dataset therefore takes time
proportional to its size, and is aborted beyond a limit that the caller sets.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import pathlib
import pickle
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock import _C

_OBJECT_S = 2e-6  # the approximate time for inspecting one object here

_COMPARED = (  # by value, if it has no digest
    type(None), bool, int, float, complex, str, bytes, range, slice, type, type(Ellipsis),
    np.generic, np.dtype, torch.dtype, torch.device, torch.Size, enum.Enum, pathlib.PurePath,
    re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    types.BuiltinFunctionType, np.ufunc, type(threading.Lock()), type(threading.RLock()),
    types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_DIGESTED = (list, tuple, set, frozenset, dict, bytearray, torch.Tensor, np.ndarray)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
# With only objects that do not change what a dataset returns.
_IMMUTABLE_MODULES = (
    "pyarrow.", "penstock.worker.shared_list.", "penstock.caching.memory_store.",
    "penstock.caching.disk_store.",
)  # fmt: skip
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_...; Python classes are not immutable
_MUTABLE_HEAP_TYPE = _HEAP_TYPE | _IMMUTABLE_TYPE
_POINTER_BYTES = 8
_PYTHONS_FOLDERS = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")), "<frozen ")
# Packages whose modules hold no state that affects samples, except the global generators of torch
# and numpy, which are restored.
_STATELESS_PACKAGES = frozenset(
    {
        "penstock", "torch", "torchvision", "torchaudio", "torchtext", "numpy", "PIL", "pandas",
        "scipy", "pyarrow", "datasets", "fsspec", "cloudpickle", "pytest", "_pytest",
    }
)  # fmt: skip
# Objects of these standard modules, in a library's module, are not state that affects samples.
_STATELESS_MODULES = frozenset(
    {"typing", "types", "abc", "functools", "logging", "enum", "dataclasses", "builtins", "weakref",
     "string", "importlib.metadata", "_abc", "inspect", "operator", "warnings", "contextlib"}
)  # fmt: skip
_LIBRARY_DEPTH_MAX = 4
_PACKAGES_FOLDER = re.compile(r"/(site|dist)-packages/")


class _OpaqueError(Exception):
    """The objects include one whose changes cannot be detected here."""


class Fingerprint:
    """Equal to a later fingerprint of the same objects if no reachable object has changed."""

    def __init__(self, parts: list[Any], seen: dict[Any, Any]) -> None:
        self._parts = parts
        self._seen = seen  # kept alive, so that the ids among the parts stay unique

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, Fingerprint) and self._parts == other._parts
        except Exception:  # a value may not permit comparison, so equality is unknown
            return False

    __hash__ = None  # type: ignore[assignment]


def fingerprint(*roots: Any, cost_s_max: float) -> Fingerprint | None:
    """Return the current state of everything that is reachable from these objects.

    Code is followed into the program's functions and classes, and the globals that they name. Of an
    installed package that is reached, all modules are inspected for generators, counters and
    containers, and also the packages that these modules import; a package with compiled modules may
    hold any state, unless it is a known one. Return None if undetected changes are possible (memory
    shared with other processes, open files and other foreign handles) or if the inspection would
    exceed ``cost_s_max`` seconds, by an estimate that is the same each time. Items of containers of
    plain data are read without changing reference counts, so that a worker keeps sharing their
    pages with the trainer.
    """
    walk = _Walk(cost_s_max)
    try:
        for root in roots:
            walk.visit(root)
    except Exception:  # not only _OpaqueError: an object may raise anything on inspection
        return None
    return Fingerprint(walk.parts, walk.seen)


class _Walk:
    def __init__(self, cost_s_max: float) -> None:
        self.parts: list[Any] = []
        self.seen: dict[Any, Any] = {}  # mostly by id
        self._packages: set[str] = set()  # installed packages that were inspected
        self._content = _C.PlainContent(cost_s_max)

    def visit(self, value: Any) -> None:
        self._content.spend(_OBJECT_S)
        if self._content.is_opaque:
            raise _OpaqueError
        if type(value) in _PLAIN:  # zeros of different types and signs are equal, but not the same
            self.parts.append(self._content.digest(value) or value)
            return
        is_value = isinstance(value, _COMPARED)
        self.parts.append(value if is_value else id(value))
        if id(value) in self.seen:
            return
        if not is_value:
            self.seen[id(value)] = value
            self._look_into(value)
        elif isinstance(value, type):
            self._look_into_class(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            if not isinstance(value.__self__, types.ModuleType):
                self.visit(value.__self__)
        elif hasattr(value, "__dict__"):
            self.seen[id(value)] = value
            self._visit_attributes(value)

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.visit(value)

    def _visit_attributes(self, value: Any) -> None:
        attributes = vars(value)
        self._visit_all(attributes)
        self._visit_all(attributes.values())

    def _look_into(self, value: Any) -> None:
        kind: Any = type(value)
        self.parts.append(kind)
        if isinstance(value, (*_CONTAINERS, *_DIGESTED)):
            self._look_into_data(value)
        elif isinstance(value, (torch.Generator, random.Random)) or kind.__module__.startswith(
            "numpy.random"
        ):
            self.parts.append(state_of_generator(value))
        elif isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, types.MethodType):
            self._visit_all((value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__)
        elif isinstance(value, property):
            self._visit_all((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self._visit_all((value.func, value.args, value.keywords, vars(value)))
        elif isinstance(value, weakref.ref):
            self.visit(value())
        elif isinstance(value, types.ModuleType):
            self._look_into_module(value, tuple(vars(value)))
        elif not f"{kind.__module__}.".startswith(_IMMUTABLE_MODULES):
            self._look_into_object(value)

    def _look_into_data(self, value: Any) -> None:
        if hasattr(value, "__dict__") and not isinstance(value, np.memmap):
            self._visit_attributes(value)
        if isinstance(value, _CONTAINERS) and type(value) not in _CONTAINERS:
            self._visit_all(_slot_values(value))
            self.visit(type(value))
        if isinstance(value, collections.defaultdict):
            self.visit(value.default_factory)
        digest = self._content.digest(value) if isinstance(value, _DIGESTED) else None
        if digest is not None:
            self.parts.append(digest)
        elif isinstance(value, _CONTAINERS):
            self._look_into_items(value)
        else:
            raise _OpaqueError

    def _look_into_items(self, value: Any) -> None:
        base: Any = next(base for base in _CONTAINERS if isinstance(value, base))
        self.parts.append(base.__len__(value))  # a subclass may override it arbitrarily
        if isinstance(value, collections.OrderedDict):
            self._visit_all(collections.OrderedDict.__iter__(value))
        else:
            self._visit_all(base.__iter__(value))
        if isinstance(value, dict):
            self._visit_all(dict.values(value))

    def _look_into_object(self, value: Any) -> None:
        kind: Any = type(value)
        if kind.__module__.partition(".")[0] == "multiprocessing" or not _has_only_attributes(kind):
            raise _OpaqueError
        if hasattr(value, "__dict__"):
            self._visit_attributes(value)
        self._visit_all(_slot_values(value))
        self.visit(kind)

    def _look_into_class(self, kind: type) -> None:
        self.seen[id(kind)] = kind
        self._visit_all(kind.__mro__[1:])
        is_of_library = _is_library_code(kind)
        if is_of_library:
            self._look_into_package(kind.__module__)
        for name, member in vars(kind).items():
            if isinstance(member, types.FunctionType):
                is_looked_at = not _is_library_code(member)  # a program may have replaced some
            elif isinstance(member, (staticmethod, classmethod, property)):
                is_looked_at = not is_of_library
            else:
                is_looked_at = not (is_of_library or name.startswith("__") or name == "_abc_impl")
            if is_looked_at:
                self.parts.append(name)
                self.visit(member)

    def _look_into_function(self, value: types.FunctionType) -> None:
        self._visit_all(value.__defaults__ or ())
        self._visit_all((value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:
                self.parts.append(None)  # not filled yet
        if _is_library_code(value):
            self._look_into_package(value.__module__)
        else:
            self._visit_attributes(value)
            names = _names_in(value.__code__)
            self._look_into_names(value.__globals__, names)
            for name in names:  # imported where they are used
                if name in sys.modules and name not in value.__globals__:
                    self._look_into_module(sys.modules[name], names)

    def _look_into_names(self, place: dict[str, Any], names: tuple[str, ...]) -> None:
        for name in names:
            if name not in place:
                continue
            if isinstance(place[name], types.ModuleType):
                self._look_into_module(place[name], names)
            else:
                self.parts.append(name)
                self.visit(place[name])

    def _look_into_module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Inspect the attributes of a module that are named in the code that uses it."""
        self.parts.append(module.__name__)
        if _is_library_code(module):
            self._look_into_package(module.__name__)
        elif (id(module), names) not in self.seen:
            self.seen[(id(module), names)] = module
            self._look_into_names(vars(module), names)

    def _look_into_package(self, module_name: str | None) -> None:
        """Inspect the state in modules of an installed package and of packages they import."""
        wanted = [(module_name or "").partition(".")[0]]
        while wanted:
            package = wanted.pop()
            if package in self._packages or _is_stateless(package):
                continue
            self._packages.add(package)
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == package and isinstance(module, types.ModuleType):
                    if not _is_python_module(module):
                        raise _OpaqueError
                    self.parts.append(name)
                    wanted += self._look_at_globals(package, module)

    def _look_at_globals(self, package: str, module: types.ModuleType) -> set[str]:
        """Inspect the values of a library's module; return the packages that it refers to."""
        others = set()
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                others.add(value.__name__.partition(".")[0])
            elif not (name.startswith("__") and name.endswith("__")):
                origin = getattr(value, "__module__", None)
                top = origin.partition(".")[0] if isinstance(origin, str) else package
                if isinstance(value, (type, types.FunctionType)) and top != package:
                    others.add(top)
                else:
                    self._visit_of_library(value, package, 0)
        return others

    def _visit_of_library(self, value: Any, package: str, depth: int) -> None:
        self._content.spend(_OBJECT_S)
        if self._content.is_opaque or depth > _LIBRARY_DEPTH_MAX:
            raise _OpaqueError
        kind: Any = type(value)
        inner: Iterable[Any] = ()
        if kind in _PLAIN:
            self.parts.append(value)
            return
        if id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, (torch.Generator, random.Random)) or kind.__module__.startswith(
            "numpy.random"
        ):
            self.parts.append(state_of_generator(value))
        elif isinstance(value, type):
            if value.__module__.partition(".")[0] == package:
                inner = [
                    member
                    for name, member in vars(value).items()
                    if not (name.startswith("__") or name == "_abc_impl")
                ]
        elif isinstance(value, types.FunctionType):
            cells = (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
            inner = (*(value.__defaults__ or ()), *cells)
        elif isinstance(value, _DIGESTED) and (digest := self._content.digest(value)) is not None:
            self.parts.append(digest)
        elif isinstance(value, dict):
            inner = (*dict.keys(value), *dict.values(value))
        elif isinstance(value, _CONTAINERS):
            inner = tuple(value)
        elif not (
            isinstance(value, (*_COMPARED, types.ModuleType))
            or kind.__module__ in _STATELESS_MODULES
            or _is_stateless(kind.__module__.partition(".")[0])
        ):
            if not _has_only_attributes(kind):
                raise _OpaqueError
            inner = (*getattr(value, "__dict__", {}).values(), *_slot_values(value))
        for item in list(inner):
            self._visit_of_library(item, package, depth + 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_stateless(package: str) -> bool:
    return package in _STATELESS_PACKAGES or package in sys.stdlib_module_names or not package


def _is_python_module(module: types.ModuleType) -> bool:
    """Return whether all state of a module is in its globals, as for a Python module."""
    file = getattr(module, "__file__", None)
    return file is None or file.endswith((".py", ".pyc"))


def _is_library_code(thing: types.FunctionType | type | types.ModuleType) -> bool:
    """Return whether it belongs to an installed package or to Python itself."""
    if isinstance(thing, types.FunctionType):
        return _is_library_file(thing.__code__.co_filename)
    if isinstance(thing, type):
        found = sys.modules.get(thing.__module__)
        if found is None:
            return False
        thing = found
    if thing.__name__ == "__main__":
        return False
    file = getattr(thing, "__file__", None)
    return file is None or _is_library_file(file)


@functools.cache
def _is_library_file(path: str) -> bool:
    return path.startswith(_PYTHONS_FOLDERS) or bool(_PACKAGES_FOLDER.search(path))


@functools.cache
def _has_only_attributes(kind: Any) -> bool:
    """Return whether all state of an object of this type is in its attributes."""
    return all(
        base in (object, types.SimpleNamespace)
        or ((base.__flags__ & _MUTABLE_HEAP_TYPE) == _HEAP_TYPE and _has_no_room(base))
        for base in kind.__mro__
    ) and (bool(kind.__dictoffset__) or any(_slots_of(base) for base in kind.__mro__))


def _has_no_room(kind: type) -> bool:
    """Return whether its objects are no larger than their attributes need."""
    room = kind.__basicsize__ - (kind.__base__.__basicsize__ if kind.__base__ else 0)
    own = [*_slots_of(kind), *({"__dict__", "__weakref__"} & vars(kind).keys())]
    return room <= _POINTER_BYTES * len(own)


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    slots = [slots] if isinstance(slots, str) else list(slots)
    hidden = [name for name in slots if name.startswith("__") and not name.endswith("__")]
    return [
        f"_{kind.__name__.lstrip('_')}{name}" if name in hidden else name
        for name in slots
        if name not in ("__dict__", "__weakref__")
    ]


def _slot_values(value: Any) -> list[Any]:
    kind: Any = type(value)
    return [getattr(value, name, None) for name in _slots_of_all(kind)]


@functools.cache
def _slots_of_all(kind: Any) -> list[str]:
    return [name for base in kind.__mro__ for name in _slots_of(base)]


@functools.cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return all names that the code may look up: globals, attributes, modules it imports."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *(name for part in inner for name in _names_in(part)))


def state_of_generator(value: Any) -> Any:
    """Return the state of a generator of torch, Python or NumPy, in a form that ``==`` compares."""
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
