# SPDX-License-Identifier: Apache-2.0
"""Provide tensors of a batch on the device on which the program reads them.

A program that copies a tensor of each batch to a device receives, from then on, a copy that was
started when the batch arrived (csrc/loader/copy_stage.h). Tensors that the program copied recently
are copied ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Protocol

import torch

from penstock import _C
from penstock.compat.operators import COPY

# A tensor of the batch: a leaf by its number, a boundary tensor by its key.
Place = int | str
# After this many batches in which the program did not copy it, a tensor is no longer copied ahead.
UNUSED_BATCHES_MAX = 64
PLACES_MAX = 1024
# A leaf that the program has read in this many batches without copying it is no longer followed.
READS_MAX = 16


class PlacedBatch(Protocol):
    """A batch, for the lookup of copies of its tensors."""

    ahead: _C.AheadCopies | None

    def index_of_key(self, key: str) -> int:
        """Return the index of a boundary tensor among all tensors of the batch."""
        ...


class Placements:
    """The program's copies of one loader's batches. Confined to the training thread."""

    def __init__(self) -> None:
        self.wishes = _C.AheadWishes()  # shared with the loader's clients
        self._device: torch.device | None = None  # the last target of a copy
        self._used_at: dict[Place, int] = {}
        self._batch_count = 0
        self.follows_leaves = False  # whether leaves are watched for copies: device="auto"
        self._reads: Counter[int] = Counter()  # by leaf: batches, since the program last copied it

    def followed(self, leaf_count: int, *, is_offloaded: bool = False) -> Set[int]:
        """Return the leaves of a batch that the program may copy, as far as is known.

        The leaves of a loader with an offloaded model are followed while any tensor is copied
        ahead.
        """
        if not (self.follows_leaves or (is_offloaded and self.are_learnt)):
            return frozenset()
        leaves = range(min(leaf_count, PLACES_MAX))
        return {leaf for leaf in leaves if self._reads[leaf] < READS_MAX}

    def note_read(self, leaf: int) -> None:
        """Note that the program reads a leaf on the host; call once for each batch."""
        self._reads[leaf] += 1

    @property
    def are_learnt(self) -> bool:
        """Return whether any tensor is copied ahead."""
        return bool(self._used_at)

    def note_batch(self) -> None:
        """Count a batch; call for each."""
        self._batch_count += 1
        if self._batch_count % UNUSED_BATCHES_MAX == 0 and self._used_at:
            since = self._batch_count - UNUSED_BATCHES_MAX
            # The thread that receives the batches may differ from the one that copies them.
            used = {place: at for place, at in list(self._used_at.items()) if at > since}
            if len(used) < len(self._used_at):
                self._used_at = used
                self._update_wishes()

    def note(self, place: Place, device: torch.device) -> None:
        """Note that the program copies a tensor to a device."""
        if device != self._device:
            self._device = device
            self._used_at.clear()
        if isinstance(place, int):
            self._reads[place] = 0
        is_new = place not in self._used_at
        if is_new and len(self._used_at) >= PLACES_MAX:
            return
        self._used_at[place] = self._batch_count
        if is_new:
            self._update_wishes()

    def _update_wishes(self) -> None:
        if not self._used_at:
            self.wishes.clear()
            return
        places = list(self._used_at)
        leaves = sorted(place for place in places if isinstance(place, int))
        keys = sorted(place for place in places if isinstance(place, str))
        self.wishes.set(str(self._device), leaves, keys)


def placed_tensor(
    tensor: torch.Tensor,
    device: torch.device,
    handle: PlacedBatch | None,
    placements: Placements,
    place: Place,
) -> torch.Tensor:
    """Return ``tensor`` on ``device``: the copy that was made ahead, or one that is made now.

    ``tensor`` is the unchanged tensor at ``place`` of a batch.
    """
    if tensor.device == device:
        return tensor
    copy = None if handle is None else _taken(tensor, device, handle, placements, place)
    return tensor.to(device) if copy is None else copy


def converted_copy(
    tensor: torch.Tensor,
    device: torch.device,
    handle: PlacedBatch,
    placements: Placements,
    leaf: int,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor | None:
    """Return the result of `_to_copy` of ``tensor``, an unchanged leaf, from a copy made ahead.

    Return None if there is no such copy.
    """
    copy = _taken(tensor, device, handle, placements, leaf)
    if copy is None or (dtype in (None, copy.dtype) and _has_format(copy, memory_format)):
        return copy
    converted: torch.Tensor = COPY(copy, dtype=dtype, memory_format=memory_format)
    return converted


def _taken(
    tensor: torch.Tensor,
    device: torch.device,
    handle: PlacedBatch,
    placements: Placements,
    place: Place,
) -> torch.Tensor | None:
    """Return the copy that was made ahead, to the first caller only. Note the program's request."""
    placements.note(place, device)
    ahead = handle.ahead
    if ahead is None or ahead.device != str(device) or not _is_dense(tensor):
        return None
    index = place if isinstance(place, int) else handle.index_of_key(place)
    copy: torch.Tensor | None = ahead.take(index)
    return copy


def converts_alike(source: torch.dtype, target: torch.dtype | None) -> bool:
    """Return whether a device converts to the same bits as a CPU.

    Devices differ in the conversion of numbers that are out of an integer's range.
    """
    if target is None or target == torch.bool or target.is_floating_point or target.is_complex:
        return True
    return not (source.is_floating_point or source.is_complex)


def _has_format(tensor: torch.Tensor, memory_format: torch.memory_format | None) -> bool:
    """Return whether a copy of ``tensor`` in that format has its strides."""
    if memory_format in (None, torch.preserve_format):
        return True
    like = torch.empty_like(tensor, device="meta", memory_format=memory_format)
    return like.stride() == tensor.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a copy of it has its strides."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
