# SPDX-License-Identifier: Apache-2.0
"""Make pyarrow allocate from the allocator that a worker has tuned."""

from __future__ import annotations

import os
import sys

_POOL_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"
_USUAL_POOL = "mimalloc"


def tune_arrow_memory() -> None:
    """Make pyarrow allocate by malloc, unless the program has chosen one of Arrow's pools.

    Arrow's default pool returns freed pages to the system after some milliseconds, so that every
    batch read from Parquet incurs page faults for them. Call this together with ``tune_malloc``; a
    pyarrow that is imported later reads the environment variable.
    """
    if _POOL_VARIABLE in os.environ:
        return
    os.environ[_POOL_VARIABLE] = "system"
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and arrow.default_memory_pool().backend_name == _USUAL_POOL:
        arrow.set_memory_pool(arrow.system_memory_pool())
