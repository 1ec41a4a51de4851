# SPDX-License-Identifier: Apache-2.0
"""Access to tensors' memory: shared storages, typed ones, and the write counters."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_storage_fd

from penstock.compat.require import require

require(
    "storages",
    (
        "torch.Tensor._version",
        "torch.UntypedStorage._cdata",
        "torch.UntypedStorage._new_shared",
        "torch.multiprocessing.reductions.rebuild_storage_fd",
        "torch.storage.TypedStorage.untyped",
    ),
    needed_by="penstock.DataLoader",
    without="torch.utils.data.DataLoader works without it.",
)


def write_count(tensor: torch.Tensor) -> int:
    """Return autograd's count of writes to the tensor; inference tensors have no count."""
    return tensor._version


def identity(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for all Python objects of one storage."""
    return int(storage._cdata)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a typed storage on the memory of ``storage``, without torch's warning about them."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def untyped_part(storage: torch.TypedStorage) -> torch.UntypedStorage:
    return storage._untyped_storage  # untyped() returns it with a warning


def new_shared() -> Any:
    """Return the bound class method by which `torch.UntypedStorage` makes shared storages."""
    return torch.UntypedStorage._new_shared


class _OwnedDescriptor:
    """A descriptor that torch closes, in place of one that it would fetch from its sender."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


def open_shared(fd: int, size: int) -> torch.UntypedStorage:
    """Return the storage of a file in shared memory, and close the descriptor.

    If torch already has a live storage of the file in this process, return it.
    """
    storage: torch.UntypedStorage = rebuild_storage_fd(
        torch.UntypedStorage, _OwnedDescriptor(fd), size
    )
    return storage


def replace_new_shared(make: Any) -> None:
    """Make `make(cls, size, *, device="cpu")` create every shared storage of this process."""
    torch.UntypedStorage._new_shared = classmethod(make)  # type: ignore[method-assign, assignment]
