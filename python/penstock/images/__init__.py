# SPDX-License-Identifier: Apache-2.0
"""JPEG and PNG images that a program reads with Pillow, made natively with the same pixels."""

from __future__ import annotations

import importlib
import logging
import os
import sys

VARIABLE = "PENSTOCK_NATIVE_IMAGES"

logger = logging.getLogger(__name__)
# The modules whose functions are to be replaced once the program has imported them, and which
# module and function here does so.
_awaited = {
    "PIL.Image": "lazy_images.install",
    "torchvision.transforms.functional": "lazy_images.install_to_tensor",
    "PIL.ImageEnhance": "library_calls.install_enhance",
    "PIL.ImageOps": "library_calls.install_operations",
    "torchvision.transforms._functional_pil": "library_calls.install_functional",
    "torchvision.transforms.v2.functional": "library_calls.install_v2",
}


def open_natively() -> None:
    """Make the images of this process natively, if its program uses Pillow.

    Call it before each batch, since a dataset may import Pillow for its first sample. The kernels
    start at the first JPEG or PNG file.
    """
    if not _awaited:
        return
    if os.environ.get(VARIABLE, "1") == "0":
        _awaited.clear()
    for name in [name for name in _awaited if name in sys.modules]:
        module, _, function = _awaited.pop(name).partition(".")
        # The program's settings, such as warnings as errors, apply here: no error may reach it.
        try:
            reason = getattr(importlib.import_module(f"penstock.images.{module}"), function)()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            logger.debug("%s is left as it is: %s", name, reason)
