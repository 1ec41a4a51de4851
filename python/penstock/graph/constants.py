# SPDX-License-Identifier: Apache-2.0
"""Notices when a tensor that workers hold a copy of has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.seams.storages import write_count

SMALL_BYTES_MAX = 16_384
SMALL_COUNT_MAX = 16


class ConstantWatch:
    """Remembers tensors by position, address, version and content. Confined to one thread.

    A version that moved is not yet a change: DistributedDataParallel broadcasts buffers, which
    bumps their versions and writes the same bits. Nor is one that stayed a proof: writes through
    ``.data``, NumPy or DLPack leave it. So small constants, such as means and bounds, are compared
    each time (2 us for each); of large ones only the comparison of whole batches can tell.
    """

    def __init__(self, constants: Mapping[int, torch.Tensor]) -> None:
        self._copies = {index: tensor.detach().clone() for index, tensor in constants.items()}
        # Holding the memory keeps its address from being given to another tensor.
        self._held = [tensor.untyped_storage() for tensor in constants.values()]
        self._marks = [
            (index, tensor.data_ptr(), write_count(tensor)) for index, tensor in constants.items()
        ]
        self._small = [
            (index, _bytes(tensor), _bytes(self._copies[index]))
            for index, tensor in constants.items()
            if tensor.nbytes <= SMALL_BYTES_MAX and tensor.is_contiguous()
        ][:SMALL_COUNT_MAX]

    def changed(self, inputs: Sequence[Any]) -> list[int]:
        """The positions whose tensors now hold something else."""
        changed: list[int] = []
        for place, (index, address, version) in enumerate(self._marks):
            tensor = inputs[index]
            if tensor.data_ptr() == address and write_count(tensor) == version:
                continue
            if is_same_bits(tensor, self._copies[index]):
                self._held[place] = tensor.untyped_storage()
                self._marks[place] = (index, tensor.data_ptr(), write_count(tensor))
            else:
                changed.append(index)
        changed += [
            index
            for index, now, then in self._small
            if index not in changed and not torch.equal(now, then)
        ]
        return changed


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory, seen as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape, strides and every bit, not-a-numbers included."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    flat_a, flat_b = (
        t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for t in (a, b)
    )
    return torch.equal(flat_a, flat_b)
