# SPDX-License-Identifier: Apache-2.0
"""Access to the key-value store of a job's process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from penstock.compat.require import require

_IS_AVAILABLE = dist.is_available()
if _IS_AVAILABLE:
    require(
        "process_group",
        ("torch.distributed.distributed_c10d._get_default_store",),
        needed_by="penstock.DataLoader with ranks",
        without="Leave ranks out.",
    )


def default_store() -> Any:
    """Return the store of the default process group; None if there is no such group."""
    if not _IS_AVAILABLE or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def default_group() -> Any:
    """Return the default process group; None if there is none."""
    return dist.group.WORLD if _IS_AVAILABLE and dist.is_initialized() else None
