# SPDX-License-Identifier: Apache-2.0
"""Tensors of a batch on the device on which the program reads them.

A program that copies a tensor of each batch to a device is given, from then on, a copy that was
begun when the batch came (csrc/loader/ahead_stage.h). What is copied ahead is what the program
copied lately.
"""

from __future__ import annotations

from typing import Protocol

import torch

from penstock import _C

# A tensor of the batch: a leaf by its number, a boundary tensor by its key.
Place = int | str
# After this many batches in which nobody copied it, a tensor is copied ahead no more.
UNUSED_BATCHES_MAX = 64
PLACES_MAX = 1024


class PlacedBatch(Protocol):
    """A batch, as a copy of one of its tensors is looked for."""

    ahead: _C.AheadCopies | None

    def index_of_key(self, key: str) -> int:
        """Where a boundary tensor stands among all tensors of the batch."""
        ...


class Placements:
    """What the program copies of the batches of one loader. Confined to the training thread."""

    def __init__(self) -> None:
        self.wishes = _C.AheadWishes()  # shared with the loader's clients
        self._device: torch.device | None = None  # the last that something was copied to
        self._used_at: dict[Place, int] = {}
        self._batch_count = 0

    @property
    def are_learnt(self) -> bool:
        """Whether something is copied ahead."""
        return bool(self._used_at)

    def note_batch(self) -> None:
        """To be called for each batch."""
        self._batch_count += 1
        if self._batch_count % UNUSED_BATCHES_MAX == 0 and self._used_at:
            since = self._batch_count - UNUSED_BATCHES_MAX
            used = {place: at for place, at in self._used_at.items() if at > since}
            if len(used) < len(self._used_at):
                self._used_at = used
                self._wish()

    def note(self, place: Place, device: torch.device) -> None:
        """The program copies a tensor to a device."""
        if device != self._device:
            self._device = device
            self._used_at.clear()
        is_new = place not in self._used_at
        if is_new and len(self._used_at) >= PLACES_MAX:
            return
        self._used_at[place] = self._batch_count
        if is_new:
            self._wish()

    def _wish(self) -> None:
        if not self._used_at:
            self.wishes.clear()
            return
        leaves = sorted(place for place in self._used_at if isinstance(place, int))
        keys = sorted(place for place in self._used_at if isinstance(place, str))
        self.wishes.set(str(self._device), leaves, keys)


def placed_tensor(
    tensor: torch.Tensor,
    device: torch.device,
    handle: PlacedBatch | None,
    placements: Placements,
    place: Place,
) -> torch.Tensor:
    """``tensor``, which is the one at ``place`` of a batch, as it came, on ``device``: a copy that
    was made ahead, where there is one, or one that is made now."""
    if tensor.device == device:
        return tensor
    placements.note(place, device)
    ahead = None if handle is None else handle.ahead
    if ahead is not None and ahead.device == str(device) and _is_dense(tensor):
        assert handle is not None
        index = place if isinstance(place, int) else handle.index_of_key(place)
        copy: torch.Tensor | None = ahead.take(index)
        if copy is not None:
            return copy
    return tensor.to(device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy of it has its strides."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
