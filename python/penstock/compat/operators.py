# SPDX-License-Identifier: Apache-2.0
"""Access to operators: their schemas, the modes that see their calls, and autocast's regions."""

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
    "enable_python_dispatcher",
    "is_under_transform",
    "overload_of",
    "same_memory_as",
    "schema_of",
    "without_memory",
]

# The calls that a captured graph has where a region of autocast begins and ends.
AUTOCAST_BEGIN: Any = _enter_autocast
AUTOCAST_END: Any = _exit_autocast
# What `.to()` is where it changes something.
COPY: Any = torch.ops.aten._to_copy.default
COPY_INTO: Any = torch.ops.aten.copy_.default
# The `__torch_function__` of a subclass that is no subclass to torch's functions.
TORCH_FUNCTION_OFF: Any = _disabled_torch_function_impl


def schema_of(operator: Any) -> Any:
    """The `FunctionSchema` of an overload."""
    return operator._schema


@functools.cache
def gives_views(operator: Any) -> bool:
    """Whether a result of an overload may share memory with an operand."""
    return any(result.alias_info is not None for result in operator._schema.returns)


@functools.cache
def writes(operator: Any) -> bool:
    """Whether an overload writes to an operand."""
    return bool(operator._schema.is_mutable)


def overload_of(operator: CustomOpDef) -> OpOverload:
    """The one overload of an operator that `torch.library.custom_op` made."""
    return operator._opoverload


def is_under_transform() -> bool:
    """Whether a transform of `torch.func` is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def same_memory_as(tensor: torch.Tensor, kind: Any) -> Any:
    """A tensor of the class ``kind`` on the memory of ``tensor``; both have one count of writes."""
    return torch.Tensor._make_subclass(kind, tensor)


def without_memory(
    kind: Any, meta: torch.Tensor, device: torch.device, size: Any = None, stride: Any = None
) -> Any:
    """A tensor of the class ``kind`` that has the form of ``meta``, on ``device``, and no
    memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        meta.shape if size is None else size,
        strides=meta.stride() if stride is None else stride,
        dtype=meta.dtype,
        device=device,
    )
