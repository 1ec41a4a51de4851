# SPDX-License-Identifier: Apache-2.0
"""Notices when a tensor that workers hold a copy of is no longer what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class ConstantWatch:
    """Remembers tensors by position, address, version and content. Confined to one thread.

    The common question costs two comparisons per tensor. A version that moved is not yet a change:
    DistributedDataParallel broadcasts buffers, which bumps their versions and writes the same bits.
    """

    def __init__(self, constants: Mapping[int, torch.Tensor]) -> None:
        self._copies = {index: tensor.detach().clone() for index, tensor in constants.items()}
        # Holding the memory keeps its address from being given to another tensor.
        self._held = [tensor.untyped_storage() for tensor in constants.values()]
        self._marks = [
            (index, tensor.data_ptr(), tensor._version) for index, tensor in constants.items()
        ]

    def changed(self, inputs: Sequence[Any]) -> list[int]:
        """The positions whose tensors now hold something else."""
        changed: list[int] = []
        for place, (index, address, version) in enumerate(self._marks):
            tensor = inputs[index]
            if tensor.data_ptr() == address and tensor._version == version:
                continue
            if is_same_bits(tensor, self._copies[index]):
                self._held[place] = tensor.untyped_storage()
                self._marks[place] = (index, tensor.data_ptr(), tensor._version)
            else:
                changed.append(index)
        return changed


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape, strides and every bit, not-a-numbers included."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    flat_a, flat_b = (
        t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for t in (a, b)
    )
    return torch.equal(flat_a, flat_b)
