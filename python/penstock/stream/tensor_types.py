# SPDX-License-Identifier: Apache-2.0
"""Sparse and nested tensors of batches, taken apart into the tensors that they consist of.

The components travel like any other tensor, without a copy of the values. torch's operators use
indices and offsets without a check, so for a worker that is not trusted, they are checked here:
every place lies within the values, and a tensor that claims to be coalesced is. The check needs
memory that the worker cannot change afterwards, so indices and offsets on the host are copied for
it; they may be in memory that the trainer shares with a worker on its machine.

A tensor that requires grad is not taken apart. It is pickled as by torch's workers: jagged tensors
keep the flag, COO tensors lose it, and others are refused.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import MissingTorchNameError

_COMPRESSED = {
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}
_LAYOUTS = {name: layout for layout, name in _COMPRESSED.items()}
_BY_ROWS = ("csr", "bsr")
_INDEX_DTYPES = (torch.int64, torch.int32)
_SEQUENCE_LENGTH_MAX = 2**31 - 1  # what kernels of attention take

# The copies of indices, while the tensors of their batch live.
_copies: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def flatten_tensor(tensor: torch.Tensor) -> tuple[list[Any], list[Any]] | None:
    """Return the components of a sparse tensor, or of a nested one with the strided layout, and
    their context. None for any other tensor, and for one that must be pickled."""
    if tensor.requires_grad or vars(tensor):
        return None
    if tensor.layout is torch.sparse_coo:
        components = [tensor._indices(), tensor._values(), list(tensor.shape)]
        return components, ["coo", tensor.is_coalesced()]
    if tensor.layout in _COMPRESSED:
        name = _COMPRESSED[tensor.layout]
        if name in _BY_ROWS:
            indices = [tensor.crow_indices(), tensor.col_indices()]
        else:
            indices = [tensor.ccol_indices(), tensor.row_indices()]
        return [*indices, tensor.values(), list(tensor.shape)], [name]
    if tensor.is_nested and tensor.layout is torch.strided and tensor.size(0) > 0:
        try:
            from penstock.compat.nested_tensors import strided_parts
        except MissingTorchNameError:
            return None
        return list(strided_parts(tensor)), ["nested"]
    return None


def make_tensor(children: list[Any], context: Any) -> torch.Tensor:
    """Return the tensor that `flatten_tensor` has taken apart."""
    kind = context[0]
    if kind == "coo":
        indices, values, shape = children
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=context[1])
    if kind == "nested":
        from penstock.compat.nested_tensors import strided_of

        return strided_of(*children)
    compressed, plain, values, shape = children
    layout = _LAYOUTS[kind]
    return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout)


def check_tensor(children: list[Any], context: Any) -> list[Any]:
    """Return the children for `make_tensor`, with indices that no worker can change any more.

    Raises:
        ValueError: The components are inconsistent.
        RuntimeError: torch finds this.
    """
    kind = context[0]
    if kind == "nested":
        buffer, *places = _tensors(children, 4)
        places = [_own(one, buffer) for one in places]
        _check_nested(buffer, *places)
        return [buffer, *places]
    *components, shape = children
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape must be a list of sizes, got {shape!r}")
    if math.prod(shape) > 2**63 - 1:
        raise ValueError(f"the shape {shape} has more than 2**63 - 1 elements")
    *indices, values = _tensors(components, 2 if kind == "coo" else 3)
    indices = [_own(one, values) for one in indices]
    if kind == "coo":
        _check_coo(indices[0], values, shape, context[1])
    else:
        compressed, plain = indices
        layout = _LAYOUTS[kind]
        torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=layout, check_invariants=True
        )
    return [*indices, values, shape]


def flatten_jagged(tensor: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the components of a jagged tensor and their context; None if it must be pickled."""
    if tensor.requires_grad:
        return None
    try:
        from penstock.compat.nested_tensors import jagged_parts
    except MissingTorchNameError:
        return None
    return jagged_parts(tensor)


def make_jagged(children: list[Any], context: Any) -> torch.Tensor:
    """Return the tensor that `flatten_jagged` has taken apart."""
    from penstock.compat.nested_tensors import jagged_of

    values, offsets, lengths = children
    ragged_dim, min_length, max_length = context
    return jagged_of(values, offsets, lengths, ragged_dim, min_length, max_length)


def check_jagged(children: list[Any], context: Any) -> list[Any]:
    """Return the children for `make_jagged`, as `check_tensor` does.

    Raises:
        ValueError: The components are inconsistent.
    """
    given = children[:2] if len(children) == 3 and children[2] is None else children
    values, *places = _tensors(given, len(given))
    ragged_dim, min_length, max_length = context
    if type(ragged_dim) is not int or not 1 <= ragged_dim <= values.dim():
        raise ValueError(
            f"the ragged dimension must be one of 1 to {values.dim()}, got {ragged_dim!r}"
        )
    offsets, *lengths = [_index(_own(one, values)) for one in places]
    if offsets.numel() == 0 or lengths and lengths[0].numel() != offsets.numel() - 1:
        raise ValueError(
            "there must be one offset more than sequences, got "
            f"{[one.numel() for one in (offsets, *lengths)]}"
        )
    size = values.shape[ragged_dim - 1]
    starts = offsets[:-1]
    counts = lengths[0] if lengths else offsets.diff()
    least, most = _extremes(offsets)
    if least < 0 or most > size:
        raise ValueError(f"the offsets must be 0 to {size}, got {least} to {most}")
    shortest, longest = _extremes(counts)
    # In this order, so that no sum overflows.
    if shortest < 0 or longest > size or lengths and _extremes(starts + counts)[1] > size:
        raise ValueError(f"the sequences must lie within the {size} values")
    for name, bound, least, most in (
        ("minimum", min_length, 0, shortest if counts.numel() else _SEQUENCE_LENGTH_MAX),
        ("maximum", max_length, longest, _SEQUENCE_LENGTH_MAX),
    ):
        if bound is not None and (type(bound) is not int or not least <= bound <= most):
            raise ValueError(f"the {name} sequence length must be {least} to {most}, got {bound!r}")
    return [values, offsets, lengths[0] if lengths else None]


def _tensors(children: list[Any], count: int) -> list[torch.Tensor]:
    # Not of a child class either, which is how a tensor that stayed with its worker looks.
    if len(children) != count or not all(type(one) is torch.Tensor for one in children):
        raise ValueError(f"it must have {count} component tensors, got {len(children)} values")
    if any(one.layout is not torch.strided or one.is_nested for one in children):
        raise ValueError("its components must be dense tensors")
    return children


def _own(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the indices in memory that no worker shares, pinned as the values are.

    Nested tensors of a batch with the same offsets have the same copy, since torch adds only those.
    """
    if indices.device.type != "cpu":
        return indices  # a copy of this process's
    copied = _copies.get(indices)
    if copied is None:
        copied = indices.clone()
        if values.device.type == "cpu" and values.is_pinned():
            copied = copied.pin_memory()
        _copies[indices] = copied
    return copied


def _index(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1 or tensor.dtype not in _INDEX_DTYPES:
        raise ValueError(
            f"offsets and lengths must be integers in one dimension, got {tensor.dtype} in "
            f"{tensor.dim()}"
        )
    return tensor


def _extremes(indices: torch.Tensor) -> tuple[int, int]:
    """Return the least and the greatest index; (0, 0) if there is none."""
    if indices.numel() == 0:
        return 0, 0
    least, most = torch.aminmax(indices)
    return int(least), int(most)


def _check_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: list[int], is_coalesced: Any
) -> None:
    # torch's check of a coalesced tensor takes five times as long.
    if indices.dim() != 2 or indices.dtype is not torch.int64 or values.dim() == 0:
        raise ValueError(
            "the indices must be int64 in two dimensions, and the values in one or more"
        )
    sparse_dim, count = indices.shape
    if values.shape[0] != count or list(values.shape[1:]) != shape[sparse_dim:]:
        raise ValueError(
            f"the indices {list(indices.shape)} and values {list(values.shape)} must fit the "
            f"shape {shape}"
        )
    if len(shape) != sparse_dim + values.dim() - 1 or type(is_coalesced) is not bool:
        raise ValueError(f"the shape {shape} must have the dimensions of indices and values")
    for dim, row in enumerate(indices):
        least, most = _extremes(row)
        if count and (least < 0 or most >= shape[dim]):
            raise ValueError(
                f"the indices of dimension {dim} must be 0 to {shape[dim] - 1}, got {least} to "
                f"{most}"
            )
    if not is_coalesced or count < 2:
        return
    places = torch.zeros(count, dtype=torch.int64, device=indices.device)
    for dim, row in enumerate(indices):
        places.mul_(shape[dim]).add_(row)
    if not bool((places[1:] > places[:-1]).all()):
        raise ValueError("the indices of a coalesced tensor must be in order, each once")


def _check_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> None:
    is_right = buffer.dim() == 1 and buffer.stride() == (1,) or buffer.numel() == 0
    for one, dims in ((sizes, 2), (strides, 2), (offsets, 1)):
        is_right = is_right and one.dim() == dims and one.dtype is torch.int64
    if not is_right or sizes.shape != strides.shape or len(sizes) != len(offsets):
        raise ValueError("the sizes, strides and offsets of its parts must fit each other")
    # Numbers of Python, which do not overflow.
    for extents, steps, start in zip(
        sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True
    ):
        if min([*extents, *steps, start]) < 0:
            raise ValueError("the sizes, strides and offsets of its parts must be 0 or more")
        last = start + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
        if 0 not in extents and last >= buffer.numel():
            raise ValueError(
                f"its parts must lie within the {buffer.numel()} values, got a part up to {last}"
            )
