# SPDX-License-Identifier: Apache-2.0
"""Functions of Pillow and torchvision that make one image from another by several calls.

For a lazy image, the functions that are installed here note the result as one step. For all other
images, and for arguments that they do not know, they call the original functions, which also raise
the exceptions.
"""

from __future__ import annotations

import functools
import logging
import numbers
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from penstock.images.lazy_images import LazyFile, LazyImage

logger = logging.getLogger(__name__)
_replaced: list[tuple[Any, str, Any]] = []  # owner, name and original
_registries: list[dict[Any, Any]] = []  # of kernels of torchvision, with one for lazy images


def install() -> None:
    """Install all functions of modules that the program has imported. Idempotent."""
    for name, install_one in INSTALLERS.items():
        if name in sys.modules:
            install_one()


def uninstall() -> None:
    """Undo all installations."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    while _registries:
        _registries.pop().pop(LazyImage, None)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by ``make(function)``, once."""
    original = getattr(owner, name, None)
    if original is None or any(one is owner and old == name for one, old, _ in _replaced):
        return
    setattr(owner, name, functools.wraps(original)(make(original)))
    _replaced.append((owner, name, original))


def install_enhance() -> str:
    """Have ``ImageEnhance`` note its results for lazy images.

    The methods of its classes are replaced rather than ``Image.blend``, so that it does not matter
    how a program imported the classes.
    """
    from PIL import ImageEnhance

    def initialiser_of(step: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def initialise(self: Any, image: Any) -> None:
                base = image._followed(step, 0.0) if type(image) is LazyImage else None
                if base is None:
                    original(self, image)
                else:
                    self.image, self.degenerate = image, base

            return initialise

        return make

    def make_enhance(original: Any) -> Any:
        def enhance(self: Any, factor: Any) -> Any:
            image, base = self.image, self.degenerate
            noted = None
            are_lazy = type(image) is LazyImage and type(base) is LazyImage
            if are_lazy and isinstance(factor, numbers.Real):
                noted = image._blended(base, factor)
            return original(self, factor) if noted is None else noted

        return enhance

    _replace(ImageEnhance.Brightness, "__init__", initialiser_of("brightness"))
    _replace(ImageEnhance.Contrast, "__init__", initialiser_of("contrast"))
    _replace(ImageEnhance._Enhance, "enhance", make_enhance)
    return ""


def install_operations() -> str:
    """Have functions of ``ImageOps`` note their results for lazy images: ``expand``, as for the
    borders of torchvision's ``Pad``, and ``exif_transpose``."""
    from PIL import ImageOps

    def make_exif_transpose(original: Any) -> Any:
        def exif_transpose(image: Any, *, in_place: bool = False) -> Any:
            lazy = None if in_place else _as_lazy(image)
            if lazy is None:
                return original(image, in_place=in_place)
            # It loads the image before it reads the orientation.
            with lazy.held():
                return original(lazy)

        return exif_transpose

    def make_expand(original: Any) -> Any:
        def expand(image: Any, border: Any = 0, fill: Any = 0) -> Any:
            noted = None
            widths = _border_of(border) if type(image) is LazyImage else None
            if widths is not None:
                # The original function knows the colour.
                sample = original(Image.new(image.mode, (1, 1)), 1, fill).getpixel((0, 0))
                colour = sample if isinstance(sample, tuple) else (sample,) * 3
                noted = image._padded(widths, colour)
            return original(image, border, fill) if noted is None else noted

        return expand

    _replace(ImageOps, "expand", make_expand)
    _replace(ImageOps, "exif_transpose", make_exif_transpose)
    return ""


def _as_lazy(image: Any) -> LazyImage | None:
    """Return a lazy image, or the image of an opened file; None if Pillow has to load it."""
    if isinstance(image, LazyFile) and image.mode == "RGB":
        return image.lazy()
    return image if type(image) is LazyImage else None


def _border_of(border: Any) -> tuple[int, int, int, int] | None:
    """Return the widths of a border on the left, top, right and bottom; None if it is unusual."""
    widths = border if isinstance(border, tuple) else (border, border)
    if len(widths) not in (2, 4):
        return None
    if not all(type(width) is int and width >= 0 for width in widths):
        return None
    left, top, right, bottom = widths * (4 // len(widths))
    return left, top, right, bottom


def install_functional() -> str:
    """Have torchvision's functions of Pillow's images note changed hues and gray images."""
    functional = sys.modules["torchvision.transforms._functional_pil"]

    def make_to_grayscale(original: Any) -> Any:
        def to_grayscale(img: Any, num_output_channels: Any) -> Any:
            noted = None
            if type(img) is LazyImage and num_output_channels == 3:
                noted = img._gray()
            return original(img, num_output_channels) if noted is None else noted

        return to_grayscale

    _replace(functional, "adjust_hue", make_adjust_hue)
    _replace(functional, "to_grayscale", make_to_grayscale)
    return ""


def make_adjust_hue(original: Any) -> Any:
    """Return torchvision's ``adjust_hue`` for lazy and other images."""

    @functools.cache
    def is_known() -> bool:
        try:
            return _adds_shifts(original)
        except Exception as error:  # no error may reach the program
            logger.debug("adjust_hue is left as it is: %s: %s", type(error).__name__, error)
            return False

    def adjust_hue(img: Any, hue_factor: Any) -> Any:
        noted = None
        is_rgb = type(img) is LazyImage and img.mode == "RGB"
        if is_rgb and type(hue_factor) is float and -0.5 <= hue_factor <= 0.5 and is_known():
            noted = img._followed("hue", _shift_of(hue_factor))
        return original(img, hue_factor) if noted is None else noted

    return adjust_hue


def _shift_of(hue_factor: float) -> int:
    """Return the number that torchvision adds to the bytes of hues."""
    return int(hue_factor * 255) % 256


def _adds_shifts(adjust_hue: Callable[[Any, float], Any]) -> bool:
    """Return whether a function adds :func:`_shift_of`, for several factors and all hues."""
    hues = np.full((1, 256, 3), 255, np.uint8)
    hues[..., 0] = np.arange(256)
    sample = Image.frombytes("HSV", (256, 1), hues.tobytes()).convert("RGB")
    before = np.asarray(sample.convert("HSV"))
    for number in (-10, -7, -3, 2, 6, 10):
        shifted = before.copy()
        shifted[..., 0] += np.uint8(_shift_of(number / 20))
        expected = Image.frombytes("HSV", (256, 1), shifted.tobytes()).convert("RGB")
        if adjust_hue(sample, number / 20).tobytes() != expected.tobytes():
            return False
    return True


def install_v2() -> str:
    """Register ``adjust_hue`` of lazy images with torchvision's second version of transforms.

    It keeps the function that it found at its import, unlike those of the other changes.
    """
    functional = sys.modules["torchvision.transforms.v2.functional"]
    utils = sys.modules.get("torchvision.transforms.v2.functional._utils")
    registry = getattr(utils, "_KERNEL_REGISTRY", {}).get(getattr(functional, "adjust_hue", None))
    if not isinstance(registry, dict) or Image.Image not in registry:
        return "its functions of Pillow's images are in an unknown place"
    original = registry[Image.Image]
    if LazyImage not in registry:
        registry[LazyImage] = functools.wraps(original)(make_adjust_hue(original))
        _registries.append(registry)
    return ""


INSTALLERS: dict[str, Callable[[], str]] = {
    "PIL.ImageEnhance": install_enhance,
    "PIL.ImageOps": install_operations,
    "torchvision.transforms._functional_pil": install_functional,
    "torchvision.transforms.v2.functional": install_v2,
}
