# SPDX-License-Identifier: Apache-2.0
"""The trainer's work on a batch between the native stream and the program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from penstock import _C
from penstock.compat.iterators import ExceptionWrapper, pin_memory
from penstock.errors import PenstockError
from penstock.loader.client_cache import Recaller
from penstock.tracking.batch_origin import BatchHandle, ProvenanceTable, WithheldLeaves


class PinDevice(NamedTuple):
    """Device that torch pins memory for: its name by the user, and the current device's index."""

    name: Any
    number: int


class Delivery(NamedTuple):
    """Last steps of a batch of one epoch: finish pinning, and record the batch's tensors for an
    offloaded model."""

    pin_device: PinDevice | None  # None if no memory is pinned
    provenance: ProvenanceTable | None  # None if no model is offloaded
    epoch: int
    epoch_seed: int
    recaller: Recaller | None = None  # if leaves may have stayed with the workers
    notes_numbers: bool = False  # whether batches arrive out of order, each with its number
    device: torch.device | None = None  # where batches arrive, unless on the host
    has_leaves_by_rank: bool = False  # whether leaves that other ranks read are meta tensors

    @property
    def stand_in(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Make stand-ins, from meta tensors, for leaves that stayed with a worker; None if neither
        the leaves of batches are needed nor their numbers, which are sent with the leaves."""
        if self.provenance is None:
            return _refuse_leaf if self.notes_numbers else None
        from penstock.tracking.lazy_tensor import LazyTensor  # it loads Dynamo

        if self.device is None:
            return LazyTensor.withheld
        return partial(LazyTensor.withheld, device=self.device)

    def take(self, batch: Any, leaves: Any) -> tuple[Any, Any]:
        """Return the batch for the program, and its accompanying facts: see `Taken`. `leaves` are
        the arguments of `_record`; None without an offloaded model if batches arrive in order."""
        is_noted = leaves is not None and self.provenance is not None
        handle = self._record(*leaves) if is_noted else None
        leaves = None if leaves is None else leaves[:3]
        if self.pin_device is not None:
            batch, leaves = self._pinned(batch, leaves, self.pin_device)
            if leaves is True:
                return batch, leaves  # an exception
        if handle is not None:
            assert self.provenance is not None
            deferral, withholding = self.provenance.deferral, self.provenance.withholding
            has_lazy = withholding is not None and withholding.lazy_leaves
            if deferral is None and (has_lazy or self.provenance.placements.follows_leaves):
                from penstock.tracking.deferral import Deferral

                deferral = self.provenance.deferral = Deferral(self.provenance)
            if deferral is not None:  # lazy tensors may be useful
                batch = deferral.delivered(batch, handle, leaves[0])
        return batch, leaves

    def _pinned(self, batch: Any, leaves: Any, device: PinDevice) -> tuple[Any, Any]:
        """Do the work of torch's pinning thread on a batch whose plain tensors are already pinned
        natively. If that fails, return the exception to raise in its place."""
        try:
            if self.has_leaves_by_rank:
                from penstock.compat.operators import tree_map

                batch = tree_map(_kept_if_meta, batch)
            return pin_memory(batch, device.name), leaves
        except Exception:
            where = f"in pin memory thread for device {device.number}"
            return ExceptionWrapper(where=where), True

    def _record(
        self,
        leaves: list[torch.Tensor],
        boundary: dict[str, torch.Tensor],
        sequence: int,
        origin: _C.BatchOrigin | None,
        maker: int,
        ahead: _C.AheadCopies | None,
    ) -> BatchHandle:
        assert self.provenance is not None
        handle = BatchHandle(
            len(leaves), boundary, self.epoch, sequence, (self.epoch_seed, sequence), maker=maker
        )
        handle.ahead = ahead
        self.provenance.record_batch(handle, leaves)
        if self.recaller is not None:
            handle.leaf_bytes = tuple(leaf.numel() * leaf.element_size() for leaf in leaves)
        if origin is not None:
            self._record_withheld(handle, leaves, origin)
        return handle

    def _record_withheld(
        self, handle: BatchHandle, leaves: list[torch.Tensor], origin: _C.BatchOrigin
    ) -> None:
        from penstock.tracking.deferral import Deferral
        from penstock.tracking.lazy_tensor import LazyTensor

        table, recaller = self.provenance, self.recaller
        assert table is not None
        if table.withholding is None or recaller is None:
            _refuse_leaf()
        withheld = {
            place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, LazyTensor)
        }
        recaller.note(handle)
        name = f"batch {handle.sequence} of epoch {handle.epoch}"
        handle.withheld = WithheldLeaves(
            partial(recaller.recall, origin, name),
            handle.boundary,
            name,
            table.withholding.note_recall,
        )
        table.deferral = table.deferral or Deferral(table)
        for place, leaf in withheld.items():
            table.deferral.withheld(handle, place, leaf)


class _Kept(NamedTuple):
    """A tensor without memory to pin, which torch's function pins by this class's method."""

    tensor: torch.Tensor

    def pin_memory(self) -> torch.Tensor:
        return self.tensor


def _kept_if_meta(value: Any) -> Any:
    return _Kept(value) if isinstance(value, torch.Tensor) and value.is_meta else value


def _refuse_leaf(*leaf: torch.Tensor) -> NoReturn:
    raise PenstockError(
        "a worker omitted tensors of a batch without permission; trainer and workers must run the "
        "same version of penstock"
    )
