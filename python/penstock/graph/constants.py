# SPDX-License-Identifier: Apache-2.0
"""Detect changes in tensors that workers hold a copy of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.compat.storages import write_count

SMALL_BYTES_MAX = 16_384
SMALL_COUNT_MAX = 16
# Bytes of the large constants that are compared in each call, in turn.
COMPARED_BYTES_PER_CALL = 65_536


class ConstantWatch:
    """Remembers tensors by position, address, version and content. Confined to one thread.

    A new version does not prove a change: DistributedDataParallel broadcasts buffers, which
    increments their versions and writes the same bits. An equal version does not prove the
    opposite: writes through ``.data``, NumPy or DLPack do not change it. So small constants, such
    as means and bounds, are compared in each call (2 us for each); large ones piece by piece (10 us
    a call), and completely at the start of an epoch. Constants on a device are compared only then,
    since the host would have to wait for the device.
    """

    def __init__(self, constants: Mapping[int, torch.Tensor]) -> None:
        self._copies = {index: tensor.detach().clone() for index, tensor in constants.items()}
        self._marks: dict[int, _Mark] = {}
        self._small: list[int] = []
        self._large: list[int] = []
        for index, tensor in constants.items():
            self._marks[index] = _Mark(tensor, self._copies[index])
            is_small = tensor.nbytes <= SMALL_BYTES_MAX and len(self._small) < SMALL_COUNT_MAX
            if tensor.is_contiguous() and tensor.device.type == "cpu":
                (self._small if is_small else self._large).append(index)
        self._epoch = -1
        self._turn, self._offset = 0, 0  # position in the large constants

    def changed(self, inputs: Sequence[Any], epoch: int = 0) -> list[int]:
        """Return the positions whose tensors now have other contents.

        `epoch` is the epoch of the batch that is about to be computed with them.
        """
        changed: list[int] = []
        is_new = epoch > self._epoch  # with two iterators at a time, one is older
        self._epoch = max(epoch, self._epoch)
        for index, mark in self._marks.items():
            tensor, copy = inputs[index], self._copies[index]
            is_same = mark.is_of(tensor)
            if is_same and not is_new:
                continue
            if not is_same_bits(tensor, copy):
                changed.append(index)
            elif not is_same:
                self._marks[index] = _Mark(tensor, copy)
        if is_new:
            return changed
        for index in self._small:
            mark = self._marks[index]
            if index not in changed and not torch.equal(mark.now, mark.then):
                changed.append(index)
        other = self._compare_next_bytes()
        return changed if other is None or other in changed else [*changed, other]

    def _compare_next_bytes(self) -> int | None:
        """Compare the next bytes of the large constants; return the position of a changed one."""
        left = min(
            COMPARED_BYTES_PER_CALL, sum(self._marks[index].now.numel() for index in self._large)
        )
        while left > 0:
            index = self._large[self._turn]
            mark = self._marks[index]
            now = mark.now[self._offset : self._offset + left]
            then = mark.then[self._offset : self._offset + left]
            self._offset += now.numel()
            left -= now.numel()
            if self._offset >= mark.now.numel():
                self._turn, self._offset = (self._turn + 1) % len(self._large), 0
            if not torch.equal(now, then):
                return index
        return None


class _Mark:
    """The address and write count of a tensor, and views of its bytes and of its copy's bytes."""

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        # Holding the memory prevents its address from being reused for another tensor.
        self._held = tensor.untyped_storage()
        self._address = tensor.data_ptr()
        self._version = write_count(tensor)
        is_flat = tensor.is_contiguous() and tensor.device.type == "cpu"
        self.now, self.then = (_bytes(tensor), _bytes(copy)) if is_flat else (_NONE, _NONE)

    def is_of(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self._address and write_count(tensor) == self._version


_NONE = torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether dtype, shape, strides and every bit are equal, including NaNs."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    flat_a, flat_b = (
        t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for t in (a, b)
    )
    return torch.equal(flat_a, flat_b)
