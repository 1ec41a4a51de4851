# SPDX-License-Identifier: Apache-2.0
"""A list that workers read without copying it: consecutive pickled items, and their offsets.

Python counts references inside every object. A forked worker that reads an item of a list writes to
that count, and the system copies the page for it, until each worker has a copy of the list. Bytes
in one block have no counts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import context, reduction
from typing import Any, TypeVar, overload

Item = TypeVar("Item")

_OFFSET_BYTES = 8
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedList(Sequence[Item]):
    """Immutable sequence in memory that all workers share.

    For datasets that hold millions of Python objects, such as file names and labels: with a plain
    list, every worker ends up with a copy of it. Each read returns a new object equal to the
    original, so changing it does not change the list. A slice is a SharedList on the same memory.
    Forked and spawned processes share the memory, which is freed with the last list on it.
    Thread-safe.

    Args:
        items (Iterable): Picklable items. Default: no items.

    Raises:
        TypeError: If an item cannot be pickled; the message names the first such item.

    Example:
        >>> samples = SharedList([("cat.jpg", 0), ("dog.jpg", 1)])
        >>> samples[-1]
        ('dog.jpg', 1)
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        memory = _memory_of(items)
        self._view(memory, range(len(memory.offsets) - 1))

    def _view(self, memory: _Memory, places: range) -> None:
        self._memory = memory
        self._bytes, self._offsets = memory.bytes, memory.offsets
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> SharedList[Item]: ...

    def __getitem__(self, index: Any) -> Any:
        try:
            place = self._places[index]
        except IndexError:
            raise IndexError("list index out of range") from None
        except TypeError:
            kind = type(index).__name__
            raise TypeError(f"list indices must be integers or slices, not {kind}") from None
        if type(place) is range:
            return _view(self._memory, place)
        return pickle.loads(self._bytes[self._offsets[place] : self._offsets[place + 1]])

    def __iter__(self) -> Iterator[Item]:
        for place in self._places:
            yield pickle.loads(self._bytes[self._offsets[place] : self._offsets[place + 1]])

    def __repr__(self) -> str:
        return f"<SharedList of {len(self)} items, {self._bytes.nbytes / 2**20:.1f} MiB>"

    def __copy__(self) -> SharedList[Item]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedList[Item]:
        return self

    def __reduce__(self) -> Any:
        if context.get_spawning_popen() is None:
            return SharedList, (list(self),)  # to a file or another machine, by value
        return _view, (self._memory, self._places)


def _view(memory: _Memory, places: range) -> SharedList[Any]:
    made: SharedList[Any] = SharedList.__new__(SharedList)
    made._view(memory, places)
    return made


class _Memory:
    """The mapped block. All slices of a list share it, also in processes that they are sent to."""

    def __init__(self, fd: int, item_count: int) -> None:
        """Takes ownership of the descriptor."""
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.bytes = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        self.offsets = self.bytes[-(item_count + 1) * _OFFSET_BYTES :].cast("q")

    def __reduce__(self) -> Any:
        return _map, (reduction.DupFd(self._fd), len(self.offsets) - 1)


def _map(descriptor: Any, item_count: int) -> _Memory:
    return _Memory(descriptor.detach(), item_count)


def _memory_of(items: Iterable[Any]) -> _Memory:
    fd = os.memfd_create("shared-list", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        item_count = _write(fd, items)
    except BaseException:
        os.close(fd)
        raise
    return _Memory(fd, item_count)


def _write(fd: int, items: Iterable[Any]) -> int:
    """Write the items, then the start of each and the end of the last. Return their number."""
    offsets = array("q", [0])
    end = 0
    with open(fd, "wb", buffering=1 << 20, closefd=False) as file:
        for index, item in enumerate(items):
            try:
                data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise TypeError(
                    f"item {index}, a {type(item).__name__}, cannot be pickled: {error}; a "
                    f"SharedList needs picklable items, so leave that part out or create it in the "
                    f"dataset's __getitem__"
                ) from error
            end += file.write(data)
            offsets.append(end)
        file.write(bytes(-end % _OFFSET_BYTES))
        file.write(offsets)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return len(offsets) - 1
