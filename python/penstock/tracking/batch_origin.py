# SPDX-License-Identifier: Apache-2.0
"""Track the origin of a model's inputs.

For each tensor, this is the batch that it was delivered with, whether it is still unchanged, or
whether it depends on such tensors.

The table is keyed by tensor identity and holds tensors weakly, so a batch is freed when the user
drops it. A tensor that was written to in place since its delivery has lost its provenance.

Leaves of a batch may have stayed with the worker that made it (:class:`WithheldLeaves`). The
program has lazy tensors in their place. When the values of one are read, the whole batch is
recalled: from the worker that made it while that still has the leaves, otherwise from any worker,
which makes the batch again. A batch that was made again has to equal the delivered batch.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from penstock.compat.storages import write_count
from penstock.graph.constants import is_same_bits
from penstock.tracking.loader_use import LoaderUse
from penstock.tracking.placed_tensors import Placements

if TYPE_CHECKING:
    from penstock import _C
    from penstock.graph.expression import Expression

_WRITTEN = -1  # a version that no tensor has


class Deferring(Protocol):
    """Delays operators on a loader's batches until their values are read."""

    wanted_by: set[int]  # offloaded models, by their numbers
    sampled_by: set[int]

    def forget_user(self, user: int) -> None:
        """Note that an offloaded model no longer has any use for lazy tensors."""

    def delivered(self, batch: Any, handle: BatchHandle, leaves: Sequence[torch.Tensor]) -> Any:
        """Return the batch, with lazy tensors while a model wants them."""

    def withheld(self, handle: BatchHandle, place: int, leaf: Any) -> None:
        """Make the lazy tensor `leaf` represent the leaf at this place."""


@dataclass(eq=False)
class BatchHandle:
    """One delivered batch: its boundary tensors by key, its leaf count, and its number."""

    leaf_count: int
    boundary: dict[str, torch.Tensor] = field(default_factory=dict)
    epoch: int = 0  # number of the loader's epoch, from 0
    sequence: int = 0  # number in its epoch, from 0
    # The seeds of an offloaded model's draws: the epoch's seed, and the batch's number there.
    place: tuple[int, int] = (0, 0)
    maker: int = 0  # the worker that made it: a pool's by its id, a local one by its number
    rows: int | None = None  # of its first tensor, to distinguish the last batch of an epoch
    # If the batch's tensors are lazy: their values, and the values of tensors made from them; and
    # whether there may be more that are computed only on demand.
    lazy_values: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    may_wait: bool = True
    withheld: WithheldLeaves | None = None  # set if leaves stayed with the worker
    leaf_bytes: tuple[int, ...] = ()
    ahead: _C.AheadCopies | None = None  # copies of its tensors on a device
    is_watched: bool = False  # its leaves are lazy, and record reads
    read_leaves: set[int] = field(default_factory=set)  # lazy leaves that the program has read

    def index_of_key(self, key: str) -> int:
        """Return the index of a boundary tensor among all tensors of the batch."""
        return self.leaf_count + list(self.boundary).index(key)


class Withholding(Protocol):
    """Decides which leaves stay with the workers: `penstock.cut.cut_context.LeafWithholding`."""

    @property
    def lazy_leaves(self) -> Set[int]:
        """Return the leaves that the program is to receive as lazy tensors."""

    def note_recall(self, leaf: int) -> None:
        """Note that a leaf that had stayed with its worker was read."""

    def forget(self, user: int) -> None:
        """Note that a model is no longer offloaded."""


class Provenance(NamedTuple):
    """The origin of a tensor: leaf ``source`` of the batch ``handle``, or an expression.

    ``version`` is the tensor's version when it was delivered or made. ``inputs`` are the inputs of
    the expression; leaves among them are held weakly.
    """

    handle: BatchHandle
    source: int | Expression
    version: int
    inputs: tuple[Any, ...] = ()

    def input(self, position: int) -> Any:
        value = self.inputs[position]
        return value() if isinstance(value, TensorWeakRef) else value


class _Entry(NamedTuple):
    """A provenance in the table.

    Tensors made from a batch hold the handle weakly: one may be a boundary tensor of the handle.
    """

    handle: BatchHandle | weakref.ref[BatchHandle]
    address: int  # `tensor.data = other` does not change the version
    source: int | Expression
    version: int
    inputs: tuple[Any, ...]


class ProvenanceTable:
    """The provenance of a loader's tensors. Thread-compatible."""

    def __init__(self) -> None:
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.deferral: Deferring | None = None  # created when a program needs it
        self.withholding: Withholding | None = None  # set if leaves may stay with the workers
        self.model_count = 0  # number of models offloaded to the loader so far
        self.placements = Placements()  # of its tensors on a device
        self.use = LoaderUse()  # of the models that are offloaded to it now
        self.delivered_at = 0.0  # when its last batch was delivered, by time.monotonic()
        self.delivered_epoch = 0  # the newest epoch of a delivered batch
        # Clean-up for models that the program has dropped. They may be freed at any moment, so it
        # runs when the next batch is delivered.
        self.pending_cleanups: deque[Callable[[], None]] = deque()

    def record(self, leaf: torch.Tensor, provenance: Provenance) -> None:
        """Note the provenance of a tensor in a batch, which keeps the batch's handle alive."""
        handle, source, version, inputs = provenance
        self._entries[leaf] = _Entry(handle, _address(leaf), source, version, inputs)

    def record_batch(self, handle: BatchHandle, leaves: Sequence[torch.Tensor]) -> None:
        """Note the tensors of a batch, except inference tensors, which have no version counter."""
        self.delivered_at = time.monotonic()
        self.delivered_epoch = max(self.delivered_epoch, handle.epoch)
        while self.pending_cleanups:
            self.pending_cleanups.popleft()()
        self.use.note_batch()
        self.placements.note_batch()
        handle.rows = leaves[0].shape[0] if leaves and leaves[0].dim() > 0 else None
        for index, leaf in enumerate(leaves):
            if not leaf.is_inference():
                self.record(leaf, Provenance(handle, index, write_count(leaf)))

    def record_result(self, result: torch.Tensor, provenance: Provenance) -> None:
        """Note the expression that a tensor depends on, until the batch's tensors are freed."""
        handle, source, version, inputs = provenance
        self._entries[result] = _Entry(
            weakref.ref(handle), _address(result), source, version, inputs
        )

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the provenance of ``tensor``, which was written to without a new version."""
        entry = self._entries.get(tensor)
        if entry is not None:
            self._entries[tensor] = entry._replace(version=_WRITTEN)

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is from the loader and was written to in place later."""
        entry: _Entry | None = self._entries.get(tensor)
        return (
            entry is not None and not tensor.is_inference() and write_count(tensor) != entry.version
        )

    def lookup(self, tensor: torch.Tensor) -> Provenance | None:
        """Return the provenance of ``tensor``, or None.

        It has none if it is not from the loader, or if it or a tensor that it depends on was
        changed since.
        """
        entry: _Entry | None = self._entries.get(tensor)
        if entry is None or tensor.is_inference() or write_count(tensor) != entry.version:
            return None
        if _address(tensor) != entry.address:
            return None
        handle = entry.handle() if isinstance(entry.handle, weakref.ref) else entry.handle
        if handle is None:
            return None
        for value in entry.inputs:
            if isinstance(value, TensorWeakRef):
                leaf = value()
                if leaf is None or self.lookup(leaf) is None:
                    return None
        return Provenance(handle, entry.source, entry.version, entry.inputs)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of its elements; 0 for layouts without one and for lazy tensors."""
    if getattr(type(tensor), "is_lazy", False):
        return 0
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


# Returns all leaves of the batch and its boundary tensors, by key. Blocks.
Recall = Callable[[], tuple[Sequence[torch.Tensor], Mapping[str, torch.Tensor]]]


class WithheldLeaves:
    """The leaves of a batch that stayed with its worker.

    Thread-compatible: every caller holds the lock of the lazy values.
    """

    def __init__(
        self,
        recall: Recall,
        boundary: Mapping[str, torch.Tensor],
        name: str,
        note: Callable[[int], None],
    ) -> None:
        """`name` is the batch's name for users. `note` is called for each leaf that is read."""
        self._recall = recall
        self._boundary = boundary
        self._name = name
        self._note = note
        self.counts_reads = True

    def recall(self, index: int) -> Sequence[torch.Tensor]:
        """Return all leaves of the batch, since this one is read. Blocks until they arrive.

        Raises RuntimeError if the dataset returned other values than before, the dataset's error if
        the batch could not be made again, and PenstockError if no worker is left to ask.
        """
        if self.counts_reads:
            self._note(index)
        leaves, boundary = self._recall()
        self._check(index, boundary)
        return leaves

    def _check(self, index: int, made: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in self._boundary.items():
            if key in made and write_count(tensor) == 0 and not is_same_bits(tensor, made[key]):
                raise RuntimeError(
                    f"a tensor of {self._name}, number {index}, was not sent, and re-creating the "
                    f"batch when the program read it yielded different values: the dataset does "
                    f"not return the same sample for the same index and seeds, or a worker with "
                    f"different hardware made it (loader.plan names those). Make the dataset "
                    f"deterministic, use workers with the "
                    f'same hardware, or pass cut="none" to penstock.offload'
                )
