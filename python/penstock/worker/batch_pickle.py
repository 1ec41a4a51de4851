# SPDX-License-Identifier: Apache-2.0
"""Pickle objects that the nested structure of a batch cannot represent: custom classes, sparse
tensors, numpy arrays, deep or shared structures.

Plain tensors and the buffers of numpy arrays are not in the pickle but in the tensor table, so they
are sent through shared memory as for any batch. Only batches from local workers, which are child
processes of the trainer, are unpickled, and batches from pool workers with ``trust_workers``. Pool
workers have the program's classes by value, so they pickle these by name for the trainer.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from penstock import _C


def dumps(batch: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the pickle of ``batch``, and the tensors that it refers to by list index.

    Raise pickle's exceptions if a part of the batch cannot be pickled.
    """
    return _dumps(batch, _BatchPickler(io.BytesIO()))


def dumps_stored(sample: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the same of a sample that is kept, and read when this process may be gone.

    Arrays keep their strides, as in a sample that is not sent to another process. Raise
    ``TypeError`` for parts that refer to memory of a device or of another process.
    """
    return _dumps(sample, _StoragePickler(io.BytesIO()))


def _dumps(batch: object, pickler: _BatchPickler) -> tuple[bytes, list[torch.Tensor]]:
    pickler.dump(batch)
    return pickle.dumps(pickler.buffer_places) + pickler.body.getvalue(), pickler.tensors


def loads(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """Rebuild a batch from a result of :func:`dumps`.

    Arrays view the memory of ``tensors`` and keep it alive.
    """
    stream = io.BytesIO(data)
    buffer_places = pickle.load(stream)
    buffers = [tensors[place].numpy() for place in buffer_places]
    return _BatchUnpickler(stream, buffers, tensors).load()


def dumps_index(index: object) -> bytes:
    """Pickle an index that the sampler has drawn, for the worker that will fetch it."""
    return bytes(ForkingPickler.dumps(index))


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduce a tensor that is not plain to parts; plain ones among them are in the table again."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor.__reduce_ex__(5)
    if tensor.device.type != "cpu" or not tensor.is_leaf:
        return reduce_tensor(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced())
        return _rebuild_sparse_coo, parts
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _rebuild_sparse_compressed, (
            (tensor.crow_indices(), tensor.col_indices(), tensor.values()),
            tensor.size(),
            tensor.layout,
        )
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _rebuild_sparse_compressed, (
            (tensor.ccol_indices(), tensor.row_indices(), tensor.values()),
            tensor.size(),
            tensor.layout,
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return tensor.__reduce_ex__(5)
    if tensor.requires_grad or type(tensor) is torch.nn.Parameter:
        return _rebuild_leaf, (tensor.detach(), type(tensor), tensor.requires_grad)
    is_lazy = tensor.is_conj() or tensor.is_neg()
    has_names = hasattr(tensor, "has_names") and tensor.has_names()  # gone from torch 2.15 on
    if tensor.device.type == "cpu" and not is_lazy and not has_names:
        # A dtype that the table does not support: the storage is sent as bytes.
        block = _bytes_of(tensor.untyped_storage())
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return _rebuild_from_bytes, (block, tensor.dtype, *place)
    return tensor.__reduce_ex__(5)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _rebuild_storage(block: torch.Tensor) -> torch.UntypedStorage:
    return block.untyped_storage()


def _rebuild_typed_storage(block: torch.Tensor, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(
        wrap_storage=block.untyped_storage(), dtype=dtype, _internal=True
    )


def _rebuild_leaf(data: torch.Tensor, cls: type[torch.Tensor], requires_grad: bool) -> torch.Tensor:
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad)
    return data.requires_grad_(requires_grad)


def _rebuild_sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, size: torch.Size, is_coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=is_coalesced)


def _rebuild_sparse_compressed(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], size: torch.Size, layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(*parts, size, layout=layout)


def _rebuild_from_bytes(
    block: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    size: torch.Size,
    stride: tuple[int, ...],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), offset, size, stride)


_PROGRAM = ("__main__", "__mp_main__")


def _was_pickled_by_value(obj: Any) -> bool:
    """Return whether a class or function was pickled by value: only the trainer has its name."""
    module, name = obj.__module__, obj.__qualname__
    is_of_program = module in _PROGRAM or module not in sys.modules
    if not isinstance(module, str) or not is_of_program or "<" in name:  # in a function
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is None


def _named(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), sys.modules[module])


class _BatchPickler(pickle.Pickler):
    """Stores tensors and buffers separately, in the order in which it encounters them."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._keep_buffer)
        self.body = stream
        self.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table
        self.tensors: list[torch.Tensor] = []
        self.buffer_places: list[int] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor) or not _C.is_plain_tensor(obj):
            return None
        place = self._places.get(id(obj))
        if place is None:
            place = self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return place

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        if isinstance(obj, (type, types.FunctionType)) and _was_pickled_by_value(obj):
            return _named, (obj.__module__, obj.__qualname__)
        # Storages are sent as tensors of bytes: torch's reducer would open a descriptor for each.
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _rebuild_storage, (_bytes_of(obj),)
        if isinstance(obj, torch.storage.TypedStorage) and obj.device.type == "cpu":
            return _rebuild_typed_storage, (_bytes_of(obj.untyped()), obj.dtype)
        if isinstance(obj, np.ndarray) and not (obj.flags.writeable and obj.dtype.isnative):
            # Protocol 5 keeps an array read-only and its byte order, protocol 4 does not. torch's
            # queues use Python's default, which is 5 from Python 3.14 on.
            return obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.readonly or view.nbytes == 0:
            return True  # into the pickle itself
        self.buffer_places.append(len(self.tensors))
        self.tensors.append(torch.frombuffer(view, dtype=torch.uint8))
        return False


class _StoragePickler(_BatchPickler):
    """Refers to nothing that ends with this process: no descriptors, no memory of devices."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.dispatch_table = copyreg.dispatch_table

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            raise TypeError(f"a tensor on {obj.device} cannot be stored")
        if type(obj) is np.ndarray and obj.dtype.kind in "biufc":
            if not (obj.flags.c_contiguous or obj.flags.f_contiguous):
                return _rebuild_strided, (obj.copy(), obj.strides, obj.flags.writeable)
        if isinstance(obj, np.ndarray):
            return NotImplemented  # protocol 5 keeps it as it is
        return super().reducer_override(obj)


def _rebuild_strided(values: Any, strides: tuple[int, ...], is_writable: bool) -> Any:
    """Return an array with these strides, which may be negative or 0, on memory of its own."""
    ends = [stride * (count - 1) for stride, count in zip(strides, values.shape, strict=True)]
    first = -sum(end for end in ends if end < 0)
    memory = np.zeros(first + sum(end for end in ends if end > 0) + values.itemsize, np.uint8)
    made: Any = np.ndarray(values.shape, values.dtype, memory, first, strides)
    made[...] = values
    made.flags.writeable = is_writable
    return made


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: list[Any], tensors: list[torch.Tensor]) -> None:
        super().__init__(stream, buffers=buffers)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]  # type: ignore[no-any-return]
