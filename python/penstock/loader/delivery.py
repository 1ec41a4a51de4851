# SPDX-License-Identifier: Apache-2.0
"""The trainer's own work on a batch, between the native stream and the program."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from penstock.seams.iterators import ExceptionWrapper, pin_memory
from penstock.tracking.batch_origin import BatchHandle, ProvenanceTable


class PinDevice(NamedTuple):
    """Where torch pins memory for: the user's name of the device, and the current one's number."""

    name: Any
    number: int


class Delivery(NamedTuple):
    """The last steps of a batch of one epoch: finishes pinning, and notes the batch's tensors for
    an offloaded model."""

    pin_device: PinDevice | None  # None where no memory is pinned
    provenance: ProvenanceTable | None  # None where no model is offloaded
    epoch: int
    epoch_seed: int

    def take(self, batch: Any, leaves: Any) -> tuple[Any, Any]:
        """The batch as the program is given it, and its attendant facts: see `Taken`. `leaves` are
        the arguments of `_record`, None without an offloaded model."""
        handle = None if leaves is None else self._record(*leaves)
        if self.pin_device is not None:
            return self._pinned(batch, leaves, self.pin_device)
        if handle is not None:
            assert self.provenance is not None
            deferral = self.provenance.deferral
            if deferral is not None:  # an offloaded model has a use for lazy tensors
                batch = deferral.delivered(batch, handle, leaves[0])
        return batch, leaves

    def _pinned(self, batch: Any, leaves: Any, device: PinDevice) -> tuple[Any, Any]:
        """The work of torch's thread on a batch whose plain tensors have been pinned natively. When
        that fails, the exception to raise in its place."""
        try:
            return pin_memory(batch, device.name), leaves
        except Exception:
            where = f"in pin memory thread for device {device.number}"
            return ExceptionWrapper(where=where), True

    def _record(
        self, leaves: list[torch.Tensor], boundary: dict[str, torch.Tensor], sequence: int
    ) -> BatchHandle:
        assert self.provenance is not None
        handle = BatchHandle(
            len(leaves), boundary, self.epoch, sequence, (self.epoch_seed, sequence)
        )
        self.provenance.record_batch(handle, leaves)
        return handle
