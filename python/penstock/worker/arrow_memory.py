# SPDX-License-Identifier: Apache-2.0
"""Has pyarrow take its memory from the allocator that a worker has tuned."""

from __future__ import annotations

import os
import sys

_POOL_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"
_USUAL_POOL = "mimalloc"


def tune_arrow_memory() -> None:
    """Has pyarrow allocate by malloc, unless the program has chosen a pool of Arrow's.

    Arrow's usual pool gives freed pages back to the system after some milliseconds, so that every
    batch that is read from Parquet pays page faults for them. Called where ``tune_malloc`` is; a
    pyarrow that is imported later learns of it by the environment.
    """
    if _POOL_VARIABLE in os.environ:
        return
    os.environ[_POOL_VARIABLE] = "system"
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and arrow.default_memory_pool().backend_name == _USUAL_POOL:
        arrow.set_memory_pool(arrow.system_memory_pool())
