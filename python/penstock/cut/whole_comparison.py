# SPDX-License-Identifier: Apache-2.0
"""Compare a model's remaining part with the whole model: results and gradients, bit for bit.

If Python runs both, they make the same calls and no comparison is needed. A compiler makes separate
kernels for each, so they are compared before a cut of a compiled model is used: both run on copies
of their inputs, with the same random numbers, without side effects that the program could observe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from penstock.compat.operators import tree_leaves
from penstock.compat.storages import identity
from penstock.graph.constants import is_same_bits
from penstock.stream.batch_seeds import AllGeneratorsKept, torch_states


class Side(NamedTuple):
    """One way to compute, on a separate copy of the model."""

    run: Callable[[Sequence[Any]], Any]
    held: Sequence[torch.Tensor] = ()  # parameters and buffers that are not among the inputs


def first_difference(whole: Side, part: Side, inputs: Sequence[Any]) -> str | None:
    """Return the first difference between two ways to compute the same from `inputs`, or None.

    Both are run once, on copies of the inputs; gradients are taken of every tensor that requires
    grad.
    """
    expected, seen = observe(whole, inputs), observe(part, inputs)
    for kind, ours, theirs in zip(_KINDS, seen, expected, strict=True):
        if len(ours) != len(theirs) or not all(map(_is_same, ours, theirs)):
            return kind
    return None


_KINDS = ("results", "written tensors", "gradients", "random numbers")


def observe(side: Side, inputs: Sequence[Any]) -> tuple[list[Any], ...]:
    """Run one side forward and backward; return all its effects in the order of `_KINDS`."""
    copies = copies_of(inputs)
    with AllGeneratorsKept():
        results = tree_leaves(side.run(copies))
        gradients: list[Any] = []
        ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        tensors = [value for value in (*copies, *side.held) if isinstance(value, torch.Tensor)]
        starts = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        if ends and starts:
            gradients = list(torch.autograd.grad(ends, starts, _seeds(ends), allow_unused=True))
        drawn = torch_states()
    return results, tensors, gradients, drawn


def copies_of(
    inputs: Sequence[Any], is_copied: Callable[[torch.Tensor], bool] = lambda _: True
) -> list[Any]:
    """Return the inputs, with copies of the tensors for which `is_copied` is true.

    Copies of inputs that share memory share it, too.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in copies:
            return copies[id(tensor)]
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            fresh = tensor.detach().clone()
        else:
            storage = tensor.untyped_storage()
            key = identity(storage)
            if key not in storages:
                storages[key] = storage.clone()
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            with torch.no_grad():
                fresh.set_(
                    storages[key],
                    tensor.storage_offset(),
                    tensor.size(),
                    tensor.stride(),
                )
        if isinstance(tensor, torch.nn.Parameter):
            # Compilers distinguish parameters from other tensors.
            fresh = torch.nn.Parameter(fresh, requires_grad=False)
        copies[id(tensor)] = fresh.requires_grad_(tensor.requires_grad)
        return fresh

    return [
        copy(value) if isinstance(value, torch.Tensor) and is_copied(value) else value
        for value in inputs
    ]


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _seeds(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the initial gradients of the backward pass."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(end.shape, generator=generator).to(dtype=end.dtype, device=end.device)
        for end in ends
    ]


def _is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or type(a) is type(b) and bool(a == b)
    if a.layout is not b.layout or a.requires_grad != b.requires_grad:
        return False
    if a.layout is torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return is_same_bits(a.indices(), b.indices()) and is_same_bits(a.values(), b.values())
    return a.layout is torch.strided and is_same_bits(a, b)
