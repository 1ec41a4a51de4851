# SPDX-License-Identifier: Apache-2.0
"""torch's private names for tensors without memory, which are made when they are used."""

from __future__ import annotations

from typing import Any

import torch

from penstock.compat.require import require

require(
    "wrapper_tensors",
    (
        "torch.Tensor._make_wrapper_subclass",
        "torch._C.DisableTorchFunctionSubclass",
        "torch.utils._pytree.tree_map",
    ),
    needed_by="the native decoding of images for torchvision",
    without="penstock.DataLoader works without it.",
)

from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch.utils._pytree import tree_map as tree_map

__all__ = ["DisableTorchFunctionSubclass", "pixels_without_memory", "tree_map"]


def pixels_without_memory(kind: Any, height: int, width: int) -> Any:
    """Return uint8 [3, height, width] of the class ``kind``, with the strides of pixels that are
    next to each other."""
    return torch.Tensor._make_wrapper_subclass(
        kind, (3, height, width), strides=(1, 3 * width, 3), dtype=torch.uint8
    )
