# SPDX-License-Identifier: Apache-2.0
"""Calls that are written down whole, as one composite operator, before they come apart.

What they are composed of depends on whether the tensors are plain ones, and fake tensors are not:
one_hot loses its range check, upsampling bakes symbolic sizes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

UPSAMPLING: dict[tuple[str, int, bool], OpOverload] = {
    ("nearest", 1, False): aten.upsample_nearest1d.vec,
    ("nearest", 2, False): aten.upsample_nearest2d.vec,
    ("nearest", 3, False): aten.upsample_nearest3d.vec,
    ("linear", 1, False): aten.upsample_linear1d.vec,
    ("bilinear", 2, False): aten.upsample_bilinear2d.vec,
    ("bicubic", 2, False): aten.upsample_bicubic2d.vec,
    ("trilinear", 3, False): aten.upsample_trilinear3d.vec,
    ("bilinear", 2, True): aten._upsample_bilinear2d_aa.vec,
    ("bicubic", 2, True): aten._upsample_bicubic2d_aa.vec,
}


def whole_one_hot(tensor: torch.Tensor, num_classes: int = -1) -> tuple[OpOverload, list[Any]]:
    return aten.one_hot.default, [tensor, num_classes]


def whole_interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[OpOverload, list[Any]] | None:
    dims = input.dim() - 2
    operator = UPSAMPLING.get((mode, dims, antialias))
    if operator is None or recompute_scale_factor or (size is None) == (scale_factor is None):
        return None
    sizes = _per_dim(size, dims)
    factors = None if scale_factor is None else [float(f) for f in _per_dim(scale_factor, dims)]
    if mode == "nearest":
        return operator, [input, sizes, factors]
    return operator, [input, sizes, bool(align_corners), factors]


def _per_dim(value: Any, dims: int) -> Any:
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value] * dims


WHOLE_CALLS: dict[Any, Callable[..., tuple[OpOverload, list[Any]] | None]] = {
    torch.nn.functional.one_hot: whole_one_hot,
    torch.nn.functional.interpolate: whole_interpolate,
}
