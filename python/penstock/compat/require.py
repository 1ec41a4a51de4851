# SPDX-License-Identifier: Apache-2.0
"""Check a module of this package: does torch have the private names that the module uses?"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import torch

from penstock.errors import MissingTorchNameError

# The versions of torch with which the whole test suite passes.
TESTED_TORCH = ("2.11", "2.15")


def require(module: str, names: Iterable[str], needed_by: str, without: str) -> None:
    """Look up every name; raise one error that names all missing ones.

    ``names`` are dotted paths from torch's root: a module, and then attributes of it. ``needed_by``
    names the feature that cannot be used without the module, ``without`` the features that can;
    both are parts of the error's text.

    Raises:
        MissingTorchNameError: this torch lacks some of the names.
    """
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise MissingTorchNameError(
            module, missing, torch.__version__, TESTED_TORCH, needed_by, without
        )


def _exists(name: str) -> bool:
    parts = name.split(".")
    thing: object = torch
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(thing, part):
            try:
                importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                return False
        thing = getattr(thing, part)
    return True
