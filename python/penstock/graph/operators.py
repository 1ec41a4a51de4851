# SPDX-License-Identifier: Apache-2.0
"""Facts about operators: the pure ones, substitutes, and composites that are recorded whole.

With `stateless`, the user declares that an operator of another library is pure.

Functional operators are substitutes for writes, and scalar ones for numbers. The decisions, and the
operators that they apply to, are in csrc/capture/operator_traits.h.

Some calls are recorded whole, as one composite operator, instead of as their parts. Their parts
depend on whether the tensors are plain ones, and fake tensors are not: one_hot loses its range
check, upsampling and padding bake symbolic sizes in, and singular values are computed along with
their vectors, by a routine that rounds differently. An inverse decomposes into numbers and a check
of them, which is useless alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from penstock import _C
from penstock.compat.operators import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    overload_of,
    schema_of,
    tree_leaves,
)
from penstock.graph.sizes import Unlowerable

Op = TypeVar("Op")

_DECLARED = "_penstock_is_stateless"

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


def stateless(operator: Op) -> Op:
    """Declare that an operator returns the same result for the same arguments and has no effects.

    Operators of libraries that penstock does not know stay in the trainer. A declared operator may
    move into the workers like an operator of torch: it must not read state, draw random numbers or
    write to memory, and its results must not share memory with its arguments. Some batches are
    compared with the trainer's results, which shows a wrong declaration, though not immediately.
    Spawned workers need the operator, too: define it in a module imported by the dataset's module.

    Args:
        operator (CustomOpDef | OpOverload | OpOverloadPacket): Result of
            ``torch.library.custom_op``, or an operator in ``torch.ops``.

    Returns:
        CustomOpDef | OpOverload | OpOverloadPacket: ``operator``, so the function can be a
        decorator.

    Raises:
        TypeError: If ``operator`` is not an operator.
        ValueError: If the schema shows that it writes to its arguments, returns their memory or
            draws random numbers.

    Example::

        @penstock.stateless
        @torch.library.custom_op("mylib::companded", mutates_args=())
        def companded(wave: torch.Tensor, mu: float) -> torch.Tensor:
            return wave.sign() * torch.log1p(mu * wave.abs()) / math.log1p(mu)
    """
    for overload in _overloads_of(operator):
        _refuse_effects(overload)
        setattr(overload, _DECLARED, True)
    return operator


def is_declared(overload: OpOverload) -> bool:
    """Return whether `overload` was declared to be stateless."""
    return bool(getattr(overload, _DECLARED, False))


def _overloads_of(operator: Any) -> list[OpOverload]:
    if isinstance(operator, CustomOpDef):
        return [overload_of(operator)]
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    raise TypeError(
        f"stateless needs an operator, got a {type(operator).__name__}; pass a result of "
        f"torch.library.custom_op, or an operator of torch.ops"
    )


def _refuse_effects(overload: OpOverload) -> None:
    schema = schema_of(overload)
    aliases = [item for item in (*schema.arguments, *schema.returns) if item.alias_info is not None]
    if schema.is_mutable:
        reason = "writes to its arguments"
    elif aliases:
        reason = "returns memory that belongs to its arguments"
    elif torch.Tag.nondeterministic_seeded in overload.tags:
        reason = "draws random numbers"
    else:
        return
    raise ValueError(
        f"stateless needs an operator without side effects, got {schema.name}, which {reason} "
        f"according to its schema ({schema}); leave it undeclared, and it stays in the trainer"
    )


class Twin(NamedTuple):
    """An operator that computes the values that another one writes."""

    operator: OpOverload
    is_view_alone: bool  # the write changes the view of the memory and no data


@functools.cache
def functional_twin(func: OpOverload) -> Twin | None:
    """Return `aten::sub.Tensor` for `aten::sub_.Tensor`: same arguments and result, no write."""
    found = _C.functional_twin(operator_name(func))
    return None if found is None else Twin(_overload_named(found[0]), found[1])


def with_numbers(func: OpOverload, args: list[Any]) -> OpOverload:
    """Return `aten::sub.Scalar` for `aten::sub.Tensor` if Python numbers replace tensors."""
    places = frozenset(i for i, arg in enumerate(args) if isinstance(arg, (int, float)))
    return _with_numbers_at(func, places) if places else func


@functools.cache
def _with_numbers_at(func: OpOverload, places: frozenset[int]) -> OpOverload:
    name = _C.overload_with_numbers(operator_name(func), places)
    return func if name is None else _overload_named(name)


def written_arguments(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that `func` writes to, by its schema or by our own list."""
    written: list[torch.Tensor] = []
    for position, flag in _written(func):
        if flag is None or _argument(func, flag, args, kwargs) is not False:
            leaves = tree_leaves(_argument(func, position, args, kwargs))
            written.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return written


@functools.cache
def _written(func: OpOverload) -> list[tuple[int, int | None]]:
    return _C.written_arguments(operator_name(func))


def _argument(func: OpOverload, position: int, args: Any, kwargs: Any) -> Any:
    if position < len(args):
        return args[position]
    return kwargs.get(schema_of(func).arguments[position].name)


def _overload_named(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def operator_name(func: OpOverload) -> str:
    overload = schema_of(func).overload_name
    return f"{schema_of(func).name}.{overload}" if overload else str(schema_of(func).name)


def composite_one_hot(tensor: torch.Tensor, num_classes: int = -1) -> tuple[OpOverload, list[Any]]:
    return aten.one_hot.default, [tensor, num_classes]


def composite_interpolate(
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


def composite_svdvals(
    A: torch.Tensor, *, driver: str | None = None, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    if driver is not None or out is not None:
        return None
    return aten.linalg_svdvals.default, [A]


def composite_eigvalsh(
    A: torch.Tensor, UPLO: str = "L", *, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    return None if out is not None else (aten.linalg_eigvalsh.default, [A, UPLO])


def composite_cond(A: torch.Tensor, p: Any = None) -> tuple[OpOverload, list[Any]]:
    return aten.linalg_cond.p_str if isinstance(p, str) else aten.linalg_cond.default, [A, p]


def composite_norm(
    A: torch.Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **others: Any
) -> tuple[OpOverload, list[Any]] | None:
    if ord not in SINGULAR_ORDERS:
        return None
    _refuse_options(others)
    operator = aten.linalg_norm.ord_str if isinstance(ord, str) else aten.linalg_norm.default
    return operator, [A, ord, [dim] if isinstance(dim, int) else dim, keepdim]


def composite_matrix_norm(
    A: torch.Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **others: Any
) -> tuple[OpOverload, list[Any]] | None:
    if ord not in SINGULAR_ORDERS:
        return None
    _refuse_options(others)
    norms = aten.linalg_matrix_norm
    return norms.str_ord if isinstance(ord, str) else norms.default, [A, ord, list(dim), keepdim]


def composite_legacy_norm(
    input: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **others: Any
) -> tuple[OpOverload, list[Any]] | None:
    if p != "nuc":
        return None
    _refuse_options(others)
    if dim is None:
        return aten.nuclear_norm.default, [input, keepdim]
    return aten.nuclear_norm.dim, [input, list(dim), keepdim]


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Reject `out` and `dtype`, which are not recorded."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise Unlowerable(f"a norm is called with {given[0]}")


def composite_pad(
    input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> tuple[OpOverload, list[Any]] | None:
    if mode != "constant":
        return None
    return aten.constant_pad_nd.default, [input, list(pad), 0.0 if value is None else value]


def composite_eigvals(A: torch.Tensor, *, out: Any = None) -> tuple[OpOverload, list[Any]] | None:
    return None if out is not None else (aten.linalg_eigvals.default, [A])


def composite_inv(A: torch.Tensor, *, out: Any = None) -> tuple[OpOverload, list[Any]] | None:
    return None if out is not None else (aten.linalg_inv.default, [A])


def composite_cholesky(
    A: torch.Tensor, *, upper: bool = False, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    return None if upper or out is not None else (aten.linalg_cholesky.default, [A])


def composite_solve(
    A: torch.Tensor, B: torch.Tensor, *, left: bool = True, out: Any = None
) -> tuple[OpOverload, list[Any]] | None:
    return (aten.linalg_solve.default, [A, B]) if left and out is None else None


def _per_dim(value: Any, dims: int) -> Any:
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value] * dims


# Matrix norms that are computed from singular values.
SINGULAR_ORDERS = (2, -2, "nuc")

COMPOSITE_CALLS: dict[Any, Callable[..., tuple[OpOverload, list[Any]] | None]] = {
    torch.nn.functional.one_hot: composite_one_hot,
    torch.nn.functional.interpolate: composite_interpolate,
    torch.nn.functional.pad: composite_pad,
    torch.linalg.svdvals: composite_svdvals,
    torch.linalg.eigvalsh: composite_eigvalsh,
    torch.linalg.eigvals: composite_eigvals,
    torch.linalg.inv: composite_inv,
    torch.linalg.cholesky: composite_cholesky,
    torch.linalg.solve: composite_solve,
    torch.linalg.cond: composite_cond,
    torch.linalg.norm: composite_norm,
    torch.linalg.matrix_norm: composite_matrix_norm,
    torch.norm: composite_legacy_norm,
    torch.Tensor.norm: composite_legacy_norm,
}
