# SPDX-License-Identifier: Apache-2.0
"""Tells a model's input apart from any other tensor: which batch it came with, and whether it is
still unchanged, or follows from such tensors.

The table is keyed by tensor identity and holds tensors weakly, so a batch dies when the user drops
it. A tensor that was written to in place since its delivery has lost its provenance.

Leaves of a batch may have stayed with the worker that made it (:class:`WithheldLeaves`). The
program has lazy tensors in their place. When the values of one are asked for, the whole batch is
recalled: from the worker that made it while that still has the leaves, else from any worker, who
makes the batch again. A batch that was made again has to be the batch that came.
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

_WRITTEN = -1  # the version of no tensor


class Deferring(Protocol):
    """Holds operators on a loader's batches back until their values are asked for."""

    wanted_by: set[int]  # offloaded models, by their numbers
    sampled_by: set[int]

    def forget_user(self, user: int) -> None:
        """Notes that an offloaded model has no use for lazy tensors any more."""

    def delivered(self, batch: Any, handle: BatchHandle, leaves: Sequence[torch.Tensor]) -> Any:
        """The batch, of lazy tensors while a model wants them."""

    def withheld(self, handle: BatchHandle, place: int, leaf: Any) -> None:
        """Has the lazy tensor `leaf` stand for the leaf at this place."""


@dataclass(eq=False)
class BatchHandle:
    """One delivered batch: its boundary tensors by key, how many leaves it has, and its number."""

    leaf_count: int
    boundary: dict[str, torch.Tensor] = field(default_factory=dict)
    epoch: int = 0  # as the loader begins them, from 0
    sequence: int = 0  # in its epoch, from 0
    # The seeds of an offloaded model's draws: of its epoch, and its number there.
    place: tuple[int, int] = (0, 0)
    maker: int = 0  # the worker that made it: a pool's by its id, a local one by its number
    rows: int | None = None  # of its first tensor: it tells the last batch of an epoch apart
    # If the batch's tensors are lazy: their values, and those of tensors made from them; and
    # whether there may be more that nobody computes before they are asked for.
    lazy_values: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    may_wait: bool = True
    withheld: WithheldLeaves | None = None  # where leaves stayed with the worker
    leaf_bytes: tuple[int, ...] = ()
    ahead: _C.AheadCopies | None = None  # of its tensors, on a device
    is_watched: bool = False  # its leaves are lazy, and notice when they are read
    read_leaves: set[int] = field(default_factory=set)  # by the program, of those that are lazy

    def index_of_key(self, key: str) -> int:
        """Where a boundary tensor stands among all tensors of the batch."""
        return self.leaf_count + list(self.boundary).index(key)


class Withholding(Protocol):
    """Decides which leaves stay with the workers: `penstock.cut.cut_context.LeafWithholding`."""

    @property
    def lazy_leaves(self) -> Set[int]:
        """Leaves that the program is to be given as lazy tensors."""

    def note_recall(self, leaf: int) -> None:
        """A leaf that had stayed with its worker was read."""

    def forget(self, user: int) -> None:
        """Notes that a model is offloaded no more."""


class Provenance(NamedTuple):
    """Leaf ``source`` of the batch ``handle``, or a tensor with that expression, delivered or made
    when its tensor had version ``version``.

    ``inputs`` are those of the expression; leaves among them are held weakly.
    """

    handle: BatchHandle
    source: int | Expression
    version: int
    inputs: tuple[Any, ...] = ()

    def input(self, position: int) -> Any:
        value = self.inputs[position]
        return value() if isinstance(value, TensorWeakRef) else value


class _Entry(NamedTuple):
    """A provenance in the table. Tensors made from a batch hold the handle weakly: one may be one
    of the handle's own boundary tensors."""

    handle: BatchHandle | weakref.ref[BatchHandle]
    address: int  # `tensor.data = other` leaves the version as it was
    source: int | Expression
    version: int
    inputs: tuple[Any, ...]


class ProvenanceTable:
    """Thread-compatible."""

    def __init__(self) -> None:
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.deferral: Deferring | None = None  # made when a program wants it
        self.withholding: Withholding | None = None  # where leaves may stay with the workers
        self.model_count = 0  # how many were offloaded to the loader so far
        self.placements = Placements()  # of its tensors on a device
        self.use = LoaderUse()  # of the models that are offloaded to it now
        self.delivered_at = 0.0  # when its last batch came, by time.monotonic()
        self.delivered_epoch = 0  # the newest that a batch came of
        # What is to be freed for models that the program has dropped. They may go at any moment, so
        # it is done when the next batch comes.
        self.departures: deque[Callable[[], None]] = deque()

    def record(self, leaf: torch.Tensor, provenance: Provenance) -> None:
        """Notes the provenance of a batch's own tensor, which keeps the batch's handle alive."""
        handle, source, version, inputs = provenance
        self._entries[leaf] = _Entry(handle, _address(leaf), source, version, inputs)

    def record_batch(self, handle: BatchHandle, leaves: Sequence[torch.Tensor]) -> None:
        """Notes the batch's own tensors. Those of inference mode have no version that tells."""
        self.delivered_at = time.monotonic()
        self.delivered_epoch = max(self.delivered_epoch, handle.epoch)
        while self.departures:
            self.departures.popleft()()
        self.use.note_batch()
        self.placements.note_batch()
        handle.rows = leaves[0].shape[0] if leaves and leaves[0].dim() > 0 else None
        for index, leaf in enumerate(leaves):
            if not leaf.is_inference():
                self.record(leaf, Provenance(handle, index, write_count(leaf)))

    def record_result(self, result: torch.Tensor, provenance: Provenance) -> None:
        """Notes the expression that a tensor follows from; forgotten when the batch's own tensors
        are gone."""
        handle, source, version, inputs = provenance
        self._entries[result] = _Entry(
            weakref.ref(handle), _address(result), source, version, inputs
        )

    def forget(self, tensor: torch.Tensor) -> None:
        """Drops the provenance of ``tensor``, which was written to without its version telling."""
        entry = self._entries.get(tensor)
        if entry is not None:
            self._entries[tensor] = entry._replace(version=_WRITTEN)

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` came from the loader and was written to in place since."""
        entry: _Entry | None = self._entries.get(tensor)
        return (
            entry is not None and not tensor.is_inference() and write_count(tensor) != entry.version
        )

    def lookup(self, tensor: torch.Tensor) -> Provenance | None:
        """The provenance of ``tensor``, or None when it did not come from the loader, or when it or
        a tensor that it follows from was changed since.
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
    """Where its elements lie. Layouts without one are their own, and so are lazy tensors."""
    if getattr(type(tensor), "is_lazy", False):
        return 0
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


# Gives all leaves of the batch and its boundary tensors, by key. Blocks.
Recall = Callable[[], tuple[Sequence[torch.Tensor], Mapping[str, torch.Tensor]]]


class WithheldLeaves:
    """Thread-compatible: the lock of the lazy values is held by every caller."""

    def __init__(
        self,
        recall: Recall,
        boundary: Mapping[str, torch.Tensor],
        name: str,
        note: Callable[[int], None],
    ) -> None:
        """`name` is that of the batch, for people. `note` is told of each leaf that is read."""
        self._recall = recall
        self._boundary = boundary
        self._name = name
        self._note = note
        self.counts_reads = True

    def recall(self, index: int) -> Sequence[torch.Tensor]:
        """All leaves of the batch, since this one is read. Blocks until the batch is here.

        Raises RuntimeError where the dataset gave other values than before, the dataset's error
        where the batch could not be made again, and PenstockError where no worker is left to ask.
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
                    f"tensor {index} of {self._name} had stayed with its worker, and when the "
                    f"program read it, the batch was made again with other values: the dataset "
                    f"does not give the same sample for the same index and seeds, or a worker of "
                    f"another kind made it (loader.plan names those). Make it do so, use workers "
                    f'of one kind, or pass cut="none" to penstock.offload'
                )
