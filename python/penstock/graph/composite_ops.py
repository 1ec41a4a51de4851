# SPDX-License-Identifier: Apache-2.0
"""Calls that are written down whole, as one composite operator, before they come apart.

Their parts depend on whether the tensors are plain ones, and fake tensors are not: one_hot loses
its range check, upsampling and padding bake symbolic sizes in, and singular values come with their
vectors, by a routine that rounds otherwise. An inverse comes apart into numbers and a check of
them, which is no use alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.graph.sizes import Unlowerable
from penstock.seams.operators import OpOverload

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


def whole_svdvals(
    A: torch.Tensor, *, driver: str | None = None, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    if driver is not None or out is not None:
        return None
    return aten.linalg_svdvals.default, [A]


def whole_eigvalsh(
    A: torch.Tensor, UPLO: str = "L", *, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    return None if out is not None else (aten.linalg_eigvalsh.default, [A, UPLO])


def whole_cond(A: torch.Tensor, p: Any = None) -> tuple[OpOverload, list[Any]]:
    return aten.linalg_cond.p_str if isinstance(p, str) else aten.linalg_cond.default, [A, p]


def whole_norm(
    A: torch.Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **others: Any
) -> tuple[OpOverload, list[Any]] | None:
    if ord not in SINGULAR_ORDERS:
        return None
    _refuse(others)
    operator = aten.linalg_norm.ord_str if isinstance(ord, str) else aten.linalg_norm.default
    return operator, [A, ord, [dim] if isinstance(dim, int) else dim, keepdim]


def whole_matrix_norm(
    A: torch.Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **others: Any
) -> tuple[OpOverload, list[Any]] | None:
    if ord not in SINGULAR_ORDERS:
        return None
    _refuse(others)
    norms = aten.linalg_matrix_norm
    return norms.str_ord if isinstance(ord, str) else norms.default, [A, ord, list(dim), keepdim]


def whole_old_norm(
    input: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **others: Any
) -> tuple[OpOverload, list[Any]] | None:
    if p != "nuc":
        return None
    _refuse(others)
    if dim is None:
        return aten.nuclear_norm.default, [input, keepdim]
    return aten.nuclear_norm.dim, [input, list(dim), keepdim]


def _refuse(options: Mapping[str, Any]) -> None:
    """`out` and `dtype` are not written down."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise Unlowerable(f"a norm is called with {given[0]}")


def whole_pad(
    input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> tuple[OpOverload, list[Any]] | None:
    if mode != "constant":
        return None
    return aten.constant_pad_nd.default, [input, list(pad), 0.0 if value is None else value]


def whole_eigvals(A: torch.Tensor, *, out: Any = None) -> tuple[OpOverload, list[Any]] | None:
    return None if out is not None else (aten.linalg_eigvals.default, [A])


def whole_inv(A: torch.Tensor, *, out: Any = None) -> tuple[OpOverload, list[Any]] | None:
    return None if out is not None else (aten.linalg_inv.default, [A])


def whole_cholesky(
    A: torch.Tensor, *, upper: bool = False, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    return None if upper or out is not None else (aten.linalg_cholesky.default, [A])


def whole_solve(
    A: torch.Tensor, B: torch.Tensor, *, left: bool = True, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    return (aten.linalg_solve.default, [A, B]) if left and out is None else None


def _per_dim(value: Any, dims: int) -> Any:
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value] * dims


# Norms of matrices that are made of singular values.
SINGULAR_ORDERS = (2, -2, "nuc")

WHOLE_CALLS: dict[Any, Callable[..., tuple[OpOverload, list[Any]] | None]] = {
    torch.nn.functional.one_hot: whole_one_hot,
    torch.nn.functional.interpolate: whole_interpolate,
    torch.nn.functional.pad: whole_pad,
    torch.linalg.svdvals: whole_svdvals,
    torch.linalg.eigvalsh: whole_eigvalsh,
    torch.linalg.eigvals: whole_eigvals,
    torch.linalg.inv: whole_inv,
    torch.linalg.cholesky: whole_cholesky,
    torch.linalg.solve: whole_solve,
    torch.linalg.cond: whole_cond,
    torch.linalg.norm: whole_norm,
    torch.linalg.matrix_norm: whole_matrix_norm,
    torch.norm: whole_old_norm,
    torch.Tensor.norm: whole_old_norm,
}
