# SPDX-License-Identifier: Apache-2.0
"""Pickle the objects with which a worker on another machine makes batches.

cloudpickle sends functions and classes of the program by value, and functions and classes of
modules by name. This module differs from it in four ways. torch's storages are sent as bytes, once
for any number of tensors that view them (torch's reduction copies them twice, and names them by
their address). Classes get no random name, so the same program gives the same pickle again. Open
files and accelerator memory are rejected, since a worker could not have the same. All other objects
are pickled by value: a numpy.memmap with all mapped data, and not by the name of its file.

The same objects give the same bytes again, in this process and in another run of the program, with
two exceptions: sets of strings, whose order differs between processes unless PYTHONHASHSEED is set,
and functions that use a package of which more was imported in the meantime.
"""

from __future__ import annotations

import functools
import inspect
import io
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pickle import PickleBuffer, PicklingError
from typing import Any, NamedTuple, Protocol

import cloudpickle
import torch

from penstock.compat.storages import typed_storage, untyped_part
from penstock.worker.fetching import FetchSpec
from penstock.worker.fingerprint import Fingerprint, fingerprint

_UNIVERSAL_DEVICES = ("cpu", "meta")  # devices that every worker has
_CLASS_MAKERS = ("_make_skeleton_class", "_make_skeleton_enum")
_TRACKER_ID = re.compile("[0-9a-f]{32}")
# An inspection may take this long, or as long as the pickling that it could have avoided.
_LOOK_S_MIN = 0.25
# Limits of the search for a part that cannot be pickled.
_SEARCH_BYTES_MAX = 256 << 20  # pickled during the search in total: some seconds
_SEARCH_TRIES_MAX = 2000
_SEARCH_ITEMS_MAX = 200  # examined per container
_SEARCH_DEPTH_MAX = 12


class Sink(Protocol):
    def write(self, data: Any, /) -> object: ...


def pickle_into(sink: Sink, value: Any) -> set[str]:
    """Pickle ``value``, and return the modules that the pickle may import.

    ``sink`` receives the pickle in parts; the large ones are the memory of the objects themselves.
    Raise the exceptions of pickle and of the parts of ``value``.
    """
    pickler = _Pickler(sink)
    with _spawned_program_by_value():
        pickler.dump(value)
    return pickler.modules


@contextmanager
def _spawned_program_by_value() -> Iterator[None]:
    """Pickle objects of a spawned program by value. In a process spawned by multiprocessing, such
    as a training rank, the program is the module ``__mp_main__``, which workers cannot import.
    """
    program = sys.modules.get("__mp_main__")
    is_known = program is None or program.__name__ in cloudpickle.list_registry_pickle_by_value()
    if program is None or is_known or program.__name__ != "__mp_main__":
        yield
        return
    cloudpickle.register_pickle_by_value(program)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(program)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Record the objects that are pickled by name. This takes a fraction of the time for reading
    the opcodes afterwards, and also finds the modules that functions pickled by value hold.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._names: set[Any] = set()  # of modules, by name
        # The types of objects: a function that makes an object has the same module as its type.
        self._types: set[type] = set()
        self._types_by_value: set[type] = set()

    @property
    def modules(self) -> set[str]:
        by_name = {kind.__module__ for kind in self._types - self._types_by_value}
        return {name for name in self._names | by_name if isinstance(name, str)}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            _check_device(obj.device)
        elif isinstance(obj, torch.UntypedStorage):
            _check_device(obj.device)
            memory: Any = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
            return _storage, (PickleBuffer(memory),) if obj.nbytes() else ()
        elif isinstance(obj, torch.storage.TypedStorage):
            return typed_storage, (untyped_part(obj), obj.dtype)
        elif isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read it to the end and send the text.
            raise PicklingError(f"cannot pickle an open file ({obj.name!r})")
        reduced = super().reducer_override(obj)
        self._note(obj, is_by_value=reduced is not NotImplemented)
        return _without_tracker_id(obj, reduced)

    def _note(self, obj: Any, is_by_value: bool) -> None:
        if isinstance(obj, types.ModuleType):
            self._names.add(obj.__name__)
        elif isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            if not is_by_value:
                self._names.add(obj.__module__)
            elif isinstance(obj, type):
                self._types_by_value.add(obj)
        else:
            self._types.add(type(obj))


def _check_device(device: torch.device) -> None:
    if device.type not in _UNIVERSAL_DEVICES:
        raise PicklingError(
            f"cannot pickle a tensor on {device}, which a worker does not have; keep it on the CPU"
        )


def _without_tracker_id(obj: Any, reduced: Any) -> Any:
    """Return a class pickled by value as cloudpickle reduces it, but without the random number that
    identifies it in other pickles of the process, since each job has one pickle; and with its
    qualified name, by which the trainer identifies a nested class in a batch.
    """
    if type(reduced) is not tuple or getattr(reduced[0], "__name__", "") not in _CLASS_MAKERS:
        return reduced
    make, arguments, *rest = reduced
    *first, tracker_id, extra = arguments
    if not isinstance(tracker_id, str) or not _TRACKER_ID.fullmatch(tracker_id):
        return reduced  # another cloudpickle: the class keeps its number
    if make.__name__ == "_make_skeleton_class" and isinstance(first[-1], dict):
        first[-1] = {**first[-1], "__qualname__": obj.__qualname__}
    return make, (*first, None, extra), *rest


def _storage(data: bytearray | None = None) -> torch.UntypedStorage:
    """Return a storage on the memory that the unpickler has read."""
    if data is None:
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


class PickleCache:
    """The hash of the objects that were pickled last for the jobs of one loader, so that a dataset
    that has not changed since the previous epoch is not pickled again.

    A job is identified by the hash of its pickle. Pickling and hashing 20 GB takes a minute;
    inspecting the same data takes seconds: see :mod:`penstock.worker.fingerprint`, which also
    explains what an inspection cannot see: the content of files. Objects that it cannot prove to be
    unchanged are pickled again. Confined to the trainer's thread.
    """

    def __init__(self) -> None:
        self._look: tuple[Any, Fingerprint] | None = None  # before they were pickled
        self._found: tuple[Any, set[str]] | None = None  # the hash, and the modules in the pickle
        self._allowed_s = _LOOK_S_MIN
        self._failed_s = 0.0  # an inspection with this time limit was inconclusive

    def recall(
        self, fetch: FetchSpec, init_fn: Callable[[int], None] | None
    ) -> tuple[Any, set[str]] | None:
        """Return a copy of the hash and the modules of the last pickle if these objects are known
        to be unchanged since then. Otherwise, the caller must pickle them and call :meth:`note`."""
        before, self._look = self._look, self._look_at(fetch, init_fn)
        if self._found is None or before is None or self._look != before:
            self._found = None
            return None
        found, modules = self._found
        return found.copy(), modules

    def note(self, found: Any, modules: set[str], pickling_s: float) -> None:
        """Record the hash of the pickled objects that were last passed to :meth:`recall`."""
        self._found = (found.copy(), modules)
        self._allowed_s = max(_LOOK_S_MIN, pickling_s)

    def _look_at(
        self, fetch: FetchSpec, init_fn: Callable[[int], None] | None
    ) -> tuple[Any, Fingerprint] | None:
        if self._allowed_s < 2 * self._failed_s:
            return None
        roots = (fetch.dataset, fetch.collate_fn, init_fn)
        found = fingerprint(*roots, cost_s_max=self._allowed_s)
        self._failed_s = self._allowed_s if found is None else 0.0
        if found is None:
            return None
        options = (fetch.dataset_kind, fetch.auto_collation, fetch.drop_last, fetch.fetch_threads)
        return (*options, fetch.shards, fetch.max_skipped), found


class Unpicklable(NamedTuple):
    path: str  # such as "dataset.index['connection']"
    value: Any


def find_unpicklable(roots: Mapping[str, Any]) -> Unpicklable | None:
    """Return the innermost part, below one of ``roots``, that cannot be pickled, for a message that
    names it.

    Return None if it was not found within a bounded number of tries.
    """
    search = _Search()
    for name, root in roots.items():
        if search.fails(root):
            whole = Unpicklable(name, root)
            return search.innermost(whole) or whole
    return None


class _EnoughError(Exception):
    """The search has pickled as much as it may."""


class _Search:
    def __init__(self) -> None:
        self._bytes_left = _SEARCH_BYTES_MAX
        self._tries_left = _SEARCH_TRIES_MAX
        self._seen: dict[int, Any] = {}  # by id, kept alive so that ids stay unique
        self._failed: set[int] = set()

    def write(self, data: Any) -> None:
        self._bytes_left -= memoryview(data).nbytes
        if self._bytes_left < 0:
            raise _EnoughError

    def fails(self, value: Any) -> bool:
        """Return whether the value cannot be pickled and was not examined before."""
        if self._bytes_left < 0 or self._tries_left == 0:
            return False
        self._tries_left -= 1
        self._seen[id(value)] = value
        try:
            pickle_into(self, value)
        except _EnoughError:
            return False
        except Exception:  # the reduction of a part may raise anything
            self._failed.add(id(value))
            return True
        return False

    def innermost(self, whole: Unpicklable, depth: int = 0) -> Unpicklable | None:
        """Return the innermost failing part; None if it fails only by a reference back to an object
        that is being examined."""
        if depth == _SEARCH_DEPTH_MAX:
            return whole
        leads_back = False
        for part in _parts(whole):
            if id(part.value) in self._seen:
                leads_back |= id(part.value) in self._failed
            elif self.fails(part.value):
                found = self.innermost(part, depth + 1)
                if found is not None:
                    return found
                leads_back = True
        return None if leads_back else whole


def _parts(whole: Unpicklable) -> Iterator[Unpicklable]:
    """Yield the objects that pickle would follow from this one; none if the object cannot be
    examined.
    """
    try:
        yield from _parts_of(whole.path, whole.value)
    except Exception:
        return


def _parts_of(path: str, value: Any) -> Iterator[Unpicklable]:
    if isinstance(value, dict):
        for key, item in list(value.items())[:_SEARCH_ITEMS_MAX]:
            yield Unpicklable(f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:_SEARCH_ITEMS_MAX]):
            yield Unpicklable(f"{path}[{index}]", item)
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield Unpicklable(f"{path}.{name}", getattr(value, name))
    elif isinstance(value, types.MethodType):
        yield Unpicklable(f"{path}.__self__", value.__self__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield Unpicklable(path, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(path, value)
        return
    own = vars(value) if hasattr(value, "__dict__") else {}
    for name, item in list(own.items())[:_SEARCH_ITEMS_MAX]:
        yield Unpicklable(f"{path}.{name}", item)
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield Unpicklable(f"{path}.{name}", getattr(value, name))
    if not isinstance(value, type):
        yield Unpicklable(path, type(value))


def _parts_of_function(path: str, function: types.FunctionType) -> Iterator[Unpicklable]:
    names = inspect.getclosurevars(function)
    for name, item in names.nonlocals.items():
        yield Unpicklable(f"{path} -> the variable {name}", item)
    for name, item in names.globals.items():
        yield Unpicklable(f"{path} -> the global {name}", item)
    for item in function.__defaults__ or ():
        yield Unpicklable(f"{path} -> a default", item)
