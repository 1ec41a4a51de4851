# SPDX-License-Identifier: Apache-2.0
"""penstock feeds GPUs: a DataLoader that replaces torch's by changing the import."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The check that torch is the one this build is for comes first: it must run before _C loads.
from penstock import _torch_version  # noqa: F401  # isort: skip
from penstock.dataloader import DataLoader
from penstock.errors import PenstockError, WorkerError

if TYPE_CHECKING:
    from penstock.declared_operators import stateless
    from penstock.embedding_ids import embedding_ids
    from penstock.explanation import explain
    from penstock.installation import install, uninstall
    from penstock.offloading import detach, offload
    from penstock.plan import Plan
    from penstock.shared_list import SharedList

__all__ = [
    "DataLoader",
    "PenstockError",
    "Plan",
    "SharedList",
    "WorkerError",
    "detach",
    "embedding_ids",
    "explain",
    "install",
    "offload",
    "stateless",
    "uninstall",
]
__version__ = "0.1.0"

# The cut imports Dynamo, which takes as long as torch itself. Those who only load data, and every
# worker that is spawned, should not wait for it.
_LAZY = {
    "Plan": "penstock.plan",
    "SharedList": "penstock.shared_list",
    "detach": "penstock.offloading",
    "embedding_ids": "penstock.embedding_ids",
    "explain": "penstock.explanation",
    "install": "penstock.installation",
    "offload": "penstock.offloading",
    "stateless": "penstock.declared_operators",
    "uninstall": "penstock.installation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value
