# SPDX-License-Identifier: Apache-2.0
"""Hold the values of a lazy tensor, or the way to compute them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from penstock.compat.devices import current_stream, on_stream
from penstock.compat.operators import COPY, DisableAutocast, tree_map
from penstock.compat.storages import write_count
from penstock.graph.expression import Expression
from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.placed_tensors import placed_tensor


class LazyTable(Protocol):
    """Decides for the lazy values of one loader: `penstock.tracking.deferral.Deferral`."""

    provenance: ProvenanceTable

    def knows(self, leaf: torch.Tensor) -> bool: ...

    def forget(self, tensor: torch.Tensor) -> None: ...

    def record_result(self, result: torch.Tensor, provenance: Provenance) -> None: ...

    def end_waiting(self, value: LazyValue) -> None: ...

    def note_write(self, value: LazyValue) -> None: ...

    def defer(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def note_read(self, leaf: int) -> None: ...

    def placed(self, leaf: LazyValue, options: Mapping[str, Any]) -> torch.Tensor | None: ...

    def stand_in(self, leaf: LazyValue) -> torch.Tensor:
        """Return a tensor that represents a leaf which stayed with its worker."""
        ...


CPU = torch.device("cpu")
# A thread that fetches batches computes deferred values of old ones, while another may be reading
# them. Operators run under this lock, and take no other lock of ours.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class LazyValue:
    """The state shared by the tensors of one object in the program: values or their computation.

    Thread-safe.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_of",
        "_readers",
        "_stream",
        "device",
        "first_version",
        "handle",
        "inputs",
        "is_shared",
        "meta",
        "source",
        "table",
        "tensor",
    )

    def __init__(
        self,
        table: LazyTable,
        handle: BatchHandle,
        meta: torch.Tensor,
        source: int | Expression,
        inputs: Sequence[LazyValue | torch.Tensor] = (),
        *,
        device: torch.device | None = None,
        tensor: torch.Tensor | None = None,
        call: tuple[Callable[..., Any], Any, Any, int | None] | None = None,
        is_shared: bool = True,
    ) -> None:
        self.table = table
        self.handle: BatchHandle | None = handle  # set while needed
        self._of = weakref.ref(handle)
        self.meta = meta
        self.device = device or CPU  # device of its values, present or future
        self.source = source
        self.inputs = tuple(inputs)  # of the expression: leaves and constants
        self.tensor = tensor
        self.first_version = 0 if tensor is None else write_count(tensor)
        self.is_shared = is_shared  # whether other tensors have, or will have, the same memory
        self._call = call  # operator, arguments, keyword arguments, index of the result
        # On a device: the stream on which the program has called the operator, and the streams
        # recorded before the memory existed.
        self._stream = None if call is None or self.device == CPU else current_stream(self.device)
        self._readers: list[torch.Stream] = []
        with _lock:
            handle.lazy_values.add(self)

    @property
    def is_withheld(self) -> bool:
        """Return whether it is a leaf that stayed with its worker and was not read yet."""
        return self.tensor is None and isinstance(self.source, int)

    def read(self) -> torch.Tensor:
        """Return the values, for the program."""
        self.note_read()
        return self.materialise()

    def note_read(self) -> None:
        """Note that the program reads it, or a value that depends on it."""
        handle = self._of()
        if handle is None:
            return
        if isinstance(self.source, int):
            if self.source not in handle.read_leaves:
                handle.read_leaves.add(self.source)
                self.table.note_read(self.source)
            return
        for item in self.inputs:
            if isinstance(item, LazyValue):
                item.note_read()

    def materialise(self) -> torch.Tensor:
        """Return the values, computed now if necessary."""
        if self.tensor is None:
            with _lock:
                return self._fetch() if isinstance(self.source, int) else self._compute()
        return self.tensor

    def _fetch(self) -> torch.Tensor:
        """Return the values of a leaf that stayed with its worker. Blocks."""
        if self.tensor is None:
            handle = self.handle
            assert handle is not None and handle.withheld is not None
            assert isinstance(self.source, int)
            leaves = handle.withheld.recall(self.source)
            # The other leaves have arrived as well. They are kept only here: each keeps the batch's
            # handle.
            for value in values_of(handle):
                if value.is_withheld:
                    value._set_fetched(leaves, handle)
            assert self.tensor is not None
        return self.tensor

    def _set_fetched(self, leaves: Sequence[torch.Tensor], handle: BatchHandle) -> None:
        assert isinstance(self.source, int)
        tensor = leaves[self.source]
        self.table.provenance.record(tensor, Provenance(handle, self.source, write_count(tensor)))
        for stream in self._readers:
            tensor.record_stream(stream)
        self._readers = []
        self.tensor = tensor

    def _compute(self) -> torch.Tensor:
        if self.tensor is None:
            assert self._call is not None and self.handle is not None
            operator, args, kwargs, place = self._call
            with replaying(), on_stream(self._stream):
                if self._is_copy_of_leaf(operator, args):
                    made = self._placed(args[0])
                else:
                    made = operator(*tree_map(_computed, args), **tree_map(_computed, kwargs))
            self.tensor = made if place is None else made[place]
            for stream in self._readers:
                self.tensor.record_stream(stream)
            inputs = tuple(
                TensorWeakRef(item.materialise()) if isinstance(item, LazyValue) else item
                for item in self.inputs
            )
            # From here on, it is like the result of a captured graph.
            self.table.record_result(
                self.tensor, Provenance(self.handle, self.source, write_count(self.tensor), inputs)
            )
            self.handle = self._call = self._stream = None
            self.inputs = ()
            self._readers = []
        return self.tensor

    def _is_copy_of_leaf(self, operator: Any, args: Any) -> bool:
        """Return whether it is an unchanged leaf on a device."""
        leaf = args[0] if operator is COPY and args else None
        return (
            isinstance(leaf, LazyValue)
            and isinstance(leaf.source, int)
            and leaf.device != self.device
            and (leaf.meta.dtype, leaf.meta.stride()) == (self.meta.dtype, self.meta.stride())
        )

    def _placed(self, leaf: LazyValue) -> torch.Tensor:
        assert isinstance(leaf.source, int)
        table = self.table.provenance
        tensor = leaf.materialise()
        handle = self.handle if self.table.knows(tensor) else None  # None if it was written to
        return placed_tensor(tensor, self.device, handle, table.placements, leaf.source)

    def record_stream(self, stream: torch.Stream) -> None:
        """Note a stream on which the program reads the values."""
        with _lock:
            if self.tensor is None:
                self._readers.append(stream)
            else:
                self.tensor.record_stream(stream)

    @property
    def batch(self) -> BatchHandle | None:
        """Return its batch, while that is referenced."""
        return self._of()

    def replaced(self, tensor: torch.Tensor) -> LazyValue:
        """Return other values, whose expression is unknown."""
        batch = self.batch or BatchHandle(0)
        value = LazyValue(self.table, batch, self.meta, self.source, tensor=tensor)
        value.handle = None
        value.first_version = -1  # no tensor has this version, so it counts as written
        return value

    def pinned(self, *args: Any, **kwargs: Any) -> LazyValue:
        """Return a copy in pinned memory, which depends on the batch as this value does."""

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            copy: torch.Tensor = tensor.pin_memory(*args, **kwargs)
            return copy

        handle = self.batch
        if handle is None:
            return self.replaced(pin(self.materialise()))
        table, meta, source = self.table, self.meta, self.source
        if isinstance(source, int):
            copy = pin(self.materialise())
            table.provenance.record(copy, Provenance(handle, source, write_count(copy)))
            return LazyValue(table, handle, meta, source, tensor=copy)
        with _lock:
            if self.handle is None:  # already computed
                return self.replaced(pin(self.materialise()))
            call: tuple[Any, Any, Any, None] = (pin, (self,), {}, None)
            return LazyValue(table, handle, meta, source, self.inputs, call=call)

    def provenance(self) -> Provenance | None:
        """Return the call that it depends on, if still deferred and the batch is unchanged."""
        with _lock:
            return None if self.handle is None else self._provenance(self.handle)

    def _provenance(self, handle: BatchHandle) -> Provenance | None:
        if isinstance(self.source, int):
            return Provenance(handle, self.source, 0) if self.is_withheld else None
        inputs: list[Any] = []
        for item in self.inputs:
            if isinstance(item, LazyValue) and item.is_withheld:
                inputs.append(self.table.stand_in(item))
            elif isinstance(item, LazyValue):
                leaf = item.materialise()
                if not self.table.knows(leaf):
                    return None
                inputs.append(leaf)
            else:
                inputs.append(item)
        return Provenance(handle, self.source, 0, tuple(inputs))


def values_of(batch: BatchHandle) -> list[LazyValue]:
    """Return the values that were made from a batch and are alive."""
    with _lock:
        return [value for value in batch.lazy_values if isinstance(value, LazyValue)]


def compute_waiting(batch: BatchHandle) -> None:
    """Compute the deferred values of a batch. Leaves that stayed with their worker stay there."""
    for value in values_of(batch):
        if not value.is_withheld:
            value.materialise()


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Run recorded operators, which autograd and autocast have already processed."""
    with torch.inference_mode(False), torch.no_grad(), DisableAutocast():
        yield


def _computed(argument: Any) -> Any:
    return argument.materialise() if isinstance(argument, LazyValue) else argument
