# SPDX-License-Identifier: Apache-2.0
"""torch's private registry of the classes that its pytrees take apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.compat.require import require

require(
    "batch_types",
    ("torch.utils._pytree.SUPPORTED_NODES",),
    needed_by="sending batches of classes that are registered as pytrees",
    without="penstock.DataLoader works without it.",
)

from torch.utils._pytree import SUPPORTED_NODES

__all__ = ["registered_nodes"]


def registered_nodes() -> Mapping[type, Any]:
    """Return the registered classes, each with its ``flatten_fn`` and ``unflatten_fn``."""
    return SUPPORTED_NODES
