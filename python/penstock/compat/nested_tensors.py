# SPDX-License-Identifier: Apache-2.0
"""torch's private parts of nested tensors: the components of both layouts."""

from __future__ import annotations

from typing import Any

import torch

from penstock.compat.require import require

require(
    "nested_tensors",
    (
        "torch._nested_view_from_buffer",
        "torch.Tensor._nested_tensor_size",
        "torch.Tensor._nested_tensor_strides",
        "torch.Tensor._nested_tensor_storage_offsets",
        "torch.nested._internal.nested_tensor.NestedTensor._maybe_min_seqlen",
        "torch.nested._internal.nested_tensor.NestedTensor._maybe_max_seqlen",
        "torch.nested._internal.nested_tensor._store_val_in_tensor",
    ),
    needed_by="sending nested tensors in batches without pickling them",
    without="penstock.DataLoader works without it.",
)

from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor

__all__ = ["jagged_of", "jagged_parts", "strided_of", "strided_parts"]

# Attributes that the constructor sets, except for notes that Dynamo makes.
_OWN = {
    "_ragged_idx", "_size", "_strides", "_values", "_offsets", "_lengths", "_metadata_cache"
}  # fmt: skip
_NOTES = "_dynamo"


def jagged_parts(
    tensor: Any,
) -> tuple[list[torch.Tensor | None], list[int | None]] | None:
    """Return the components of a jagged tensor, and its ragged dimension and sequence lengths.

    Returns:
        tuple | None: The values, the offsets and the lengths (or None); the ragged dimension and
        the minimum and maximum sequence length (or None), as `jagged_of` takes them. None for a
        tensor that has more than these, such as attributes of the program's.
    """
    has_more = any(name not in _OWN and not name.startswith(_NOTES) for name in vars(tensor))
    if has_more or not tensor._metadata_cache.keys() <= {"min_seqlen", "max_seqlen"}:
        return None
    components = [tensor._values, tensor._offsets, tensor._lengths]
    return components, [tensor._ragged_idx, tensor._maybe_min_seqlen, tensor._maybe_max_seqlen]


def jagged_of(
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    ragged_dim: int,
    min_length: int | None,
    max_length: int | None,
) -> torch.Tensor:
    """Return the jagged tensor of these components, as torch's unpickling makes it."""
    metadata = {
        name: _store_val_in_tensor(length)
        for name, length in (("min_seqlen", min_length), ("max_seqlen", max_length))
        if length is not None
    }
    return NestedTensor(
        values, offsets, lengths=lengths, _ragged_idx=ragged_dim, _metadata_cache=metadata
    )


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the buffer of a strided nested tensor, and its sizes, strides and offsets."""
    return [
        tensor.values(),
        tensor._nested_tensor_size(),
        tensor._nested_tensor_strides(),
        tensor._nested_tensor_storage_offsets(),
    ]


def strided_of(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the strided nested tensor of these components, on the buffer's memory.

    Its memory is the whole storage of the buffer, so a buffer that is only a part is copied.
    """
    storage = buffer.untyped_storage()
    if buffer.storage_offset() or storage.nbytes() != buffer.numel() * buffer.element_size():
        buffer = buffer.clone()
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)
