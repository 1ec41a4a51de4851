# SPDX-License-Identifier: Apache-2.0
"""Access to operators: their schemas, dispatch modes, autocast regions, and nests of tensors.

The nests are `torch.utils._pytree`, which has no public name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from penstock.compat.require import require

require(
    "operators",
    (
        "torch._C._DisableAutocast",
        "torch._C._DisableTorchDispatch",
        "torch._C._disabled_torch_function_impl",
        "torch._C._functorch.peek_interpreter_stack",
        "torch.Tensor._make_subclass",
        "torch.Tensor._make_wrapper_subclass",
        "torch._dispatch.python.enable_python_dispatcher",
        "torch._library.custom_ops.CustomOpDef",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch.amp.autocast_mode._enter_autocast",
        "torch.amp.autocast_mode._exit_autocast",
        "torch.ops.aten._to_copy.default",
        "torch.ops.aten.add.Tensor._schema",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree.TreeSpec",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
    ),
    needed_by="penstock.offload",
    without="penstock.DataLoader works without it.",
)

from torch._C import _DisableAutocast as DisableAutocast
from torch._C import _disabled_torch_function_impl
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

__all__ = [
    "AUTOCAST_BEGIN",
    "AUTOCAST_END",
    "COPY",
    "COPY_INTO",
    "TORCH_FUNCTION_OFF",
    "CustomOpDef",
    "DisableAutocast",
    "DisableTorchDispatch",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "enable_python_dispatcher",
    "is_under_transform",
    "overload_of",
    "same_memory_as",
    "schema_of",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_memory",
]

# The calls that a captured graph has at the start and end of an autocast region.
AUTOCAST_BEGIN: Any = _enter_autocast
AUTOCAST_END: Any = _exit_autocast
# The operator of `.to()` when it has an effect.
COPY: Any = torch.ops.aten._to_copy.default
COPY_INTO: Any = torch.ops.aten.copy_.default
# The `__torch_function__` of a subclass that torch's functions do not treat as a subclass.
TORCH_FUNCTION_OFF: Any = _disabled_torch_function_impl


def schema_of(operator: Any) -> Any:
    """Return the `FunctionSchema` of an overload."""
    return operator._schema


@functools.cache
def returns_views(operator: Any) -> bool:
    """Return whether a result of an overload may share memory with an operand."""
    return any(result.alias_info is not None for result in operator._schema.returns)


@functools.cache
def writes(operator: Any) -> bool:
    """Return whether an overload writes to an operand."""
    return bool(operator._schema.is_mutable)


def overload_of(operator: CustomOpDef) -> OpOverload:
    """Return the only overload of an operator that `torch.library.custom_op` made."""
    return operator._opoverload


def is_under_transform() -> bool:
    """Return whether a transform of `torch.func` is in progress."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def same_memory_as(tensor: torch.Tensor, kind: Any) -> Any:
    """Return a tensor of the class ``kind`` on ``tensor``'s memory; both share a write count."""
    return torch.Tensor._make_subclass(kind, tensor)


def without_memory(
    kind: Any, meta: torch.Tensor, device: torch.device, size: Any = None, stride: Any = None
) -> Any:
    """Return a tensor of the class ``kind`` like ``meta``, on ``device``, without memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        meta.shape if size is None else size,
        strides=meta.stride() if stride is None else stride,
        dtype=meta.dtype,
        device=device,
    )
