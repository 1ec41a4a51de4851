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

import io
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PickleBuffer, PicklingError
from typing import Any, Protocol

import cloudpickle
import torch

from penstock.compat.storages import typed_storage, untyped_part

_ANYWHERE = ("cpu", "meta")  # devices that every worker has
_CLASS_MAKERS = ("_make_skeleton_class", "_make_skeleton_enum")
_TRACKER_ID = re.compile("[0-9a-f]{32}")


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
            memory: Any = _bytes_of(obj).numpy()
            return _storage, (PickleBuffer(memory),) if obj.nbytes() else ()
        elif isinstance(obj, torch.storage.TypedStorage):
            return _typed_storage, (untyped_part(obj), obj.dtype)
        elif isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read it to the end and send the text.
            raise PicklingError(f"cannot pickle an open file ({obj.name!r})")
        reduced = super().reducer_override(obj)
        self._note(obj, is_by_value=reduced is not NotImplemented)
        return _as_here(obj, reduced)

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
    if device.type not in _ANYWHERE:
        raise PicklingError(
            f"cannot pickle a tensor on {device}, which a worker does not have; keep it on the CPU"
        )


def _as_here(obj: Any, reduced: Any) -> Any:
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


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _storage(data: bytearray | None = None) -> torch.UntypedStorage:
    """Return a storage on the memory that the unpickler has read."""
    if data is None:
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return typed_storage(storage, dtype)
