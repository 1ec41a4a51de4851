# SPDX-License-Identifier: Apache-2.0
"""Chains of Pillow's calls on an image, in the form in which csrc/image carries them out."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

Box = tuple[int, int, int, int]  # left, top, width, height
# Width, height and filter by Pillow's number; left, top, right and bottom of the part that is
# resized, unless it is the whole image.
Resize = tuple[int, int, int] | tuple[int, int, int, float, float, float, float]
# A name and its argument:
#   brightness, contrast, saturation   factor of the enhancements of ImageEnhance
#   gray                               None
#   hue                                0 to 255, added to the bytes of the hue
#   table                              768 bytes: for each value of R, of G and of B
#   crop                               Box
#   pad                                widths on the left, top, right and bottom; R, G and B
#   resize                             Resize
#   flip                               whether columns, and rows, are mirrored
Step = tuple[str, Any]
# The steps that may differ between versions of Pillow and of its compilers. "part" is a resize of a
# part.
TESTED_STEPS = ("brightness", "contrast", "saturation", "gray", "hue", "table", "pad", "part")
_NONE: frozenset[str] = frozenset()
_BLENDS = ("brightness", "contrast", "saturation")
_FACTOR_MAX = 1e6  # kBlendFactorMax of csrc/image/colour.h
_PADDED_MAX = 1 << 24  # pixels of a padded image that is made natively


class Chain(NamedTuple):
    """A crop, a resize, another crop, further steps, and flips; each may be missing.

    Attributes:
        window (Box): Part of the file's image.
        resize (Resize | None): The first resize.
        crop (Box): Part of the resized image, or of the window.
        flips_columns (bool): Whether the result is mirrored left to right.
        flips_rows (bool): Whether the result is mirrored top to bottom.
        steps (tuple[Step, ...]): Further steps, before the flips.
        mode (str): "RGB", or "L" for one channel after a step that makes the image gray.
    """

    window: Box
    resize: Resize | None
    crop: Box
    flips_columns: bool = False
    flips_rows: bool = False
    steps: tuple[Step, ...] = ()
    mode: str = "RGB"

    @staticmethod
    def of_image(width: int, height: int) -> Chain:
        """Return the chain of a whole image."""
        whole = (0, 0, width, height)
        return Chain(whole, None, whole)

    @property
    def size(self) -> tuple[int, int]:
        """Return the width and the height of the result."""
        width, height = self.crop[2:]
        for name, value in self.steps:
            if name == "crop":
                width, height = value[2:]
            elif name == "resize":
                width, height = value[:2]
            elif name == "pad":
                width, height = width + value[0] + value[2], height + value[1] + value[3]
        return width, height

    def cropped(self, left: int, top: int, right: int, bottom: int) -> Chain | None:
        """Return the chain with a crop of its result, black beyond its borders.

        None if the crop has no pixel of the result.
        """
        width, height = self.size
        inner = (max(left, 0), max(top, 0), min(right, width), min(bottom, height))
        if not (inner[0] < inner[2] and inner[1] < inner[3]):
            return None
        chain = self._cropped_within(*inner)
        beyond = (inner[0] - left, inner[1] - top, right - inner[2], bottom - inner[3])
        return chain.padded(*beyond, (0, 0, 0)) if any(beyond) else chain

    def _cropped_within(self, left: int, top: int, right: int, bottom: int) -> Chain:
        left, top, right, bottom = self._mirrored(left, top, right, bottom)
        size = (right - left, bottom - top)
        if self.steps:
            return self.followed("crop", (left, top, *size))
        if self.resize is None:
            window = (self.window[0] + left, self.window[1] + top, *size)
            return self._replace(window=window, crop=(0, 0, *size))
        return self._replace(crop=(self.crop[0] + left, self.crop[1] + top, *size))

    def _mirrored(self, left: int, top: int, right: int, bottom: int) -> Box:
        """Return the corners of a part of the result, before the flips."""
        width, height = self.size
        if self.flips_columns:
            left, right = width - right, width - left
        if self.flips_rows:
            top, bottom = height - bottom, height - top
        return left, top, right, bottom

    def padded(
        self, left: int, top: int, right: int, bottom: int, colour: tuple[int, int, int]
    ) -> Chain | None:
        """Return the chain with borders of these widths; None if they are too wide."""
        width, height = self.size
        if (left + width + right) * (top + height + bottom) > _PADDED_MAX:
            return None
        if self.flips_columns:
            left, right = right, left
        if self.flips_rows:
            top, bottom = bottom, top
        return self.followed("pad", (left, top, right, bottom, *colour))

    def resized(
        self,
        width: int,
        height: int,
        resample: int,
        part: tuple[float, float, float, float] | None = None,
    ) -> Chain | None:
        """Return the chain with a resize of its result; None if it would have no pixels.

        ``part`` has left, top, right and bottom.
        """
        if width < 1 or height < 1:
            return None
        if part is not None:
            left, top, right, bottom = part
            if not (0 <= left < right <= self.size[0] and 0 <= top < bottom <= self.size[1]):
                return None
            if all(map(float.is_integer, map(float, part))):
                corners = (int(left), int(top), int(right), int(bottom))
                if (corners[2] - corners[0], corners[3] - corners[1]) == (width, height):
                    return self.cropped(*corners)
                if corners == (0, 0, *self.size):
                    part = None
        wanted: Resize = (width, height, resample)
        if part is not None:
            wanted = (width, height, resample, *part)
        if self.flips_columns or self.flips_rows:
            flipped = self.followed("flip", (self.flips_columns, self.flips_rows))
            return flipped._replace(flips_columns=False, flips_rows=False).followed(
                "resize", wanted
            )
        if self.resize is not None or self.steps:
            return self.followed("resize", wanted)
        return self._replace(resize=wanted, crop=(0, 0, width, height))

    def flipped(self, columns: bool, rows: bool) -> Chain:
        """Return the chain with its result mirrored."""
        return self._replace(
            flips_columns=self.flips_columns != columns, flips_rows=self.flips_rows != rows
        )

    def followed(self, name: str, value: Any = None) -> Chain:
        """Return the chain with a further step, which sees the image before the flips."""
        return self._replace(steps=(*self.steps, (name, value)))

    def converted(self, mode: str) -> Chain:
        """Return the chain with a conversion of its result to "RGB" or "L"."""
        if mode == "L" and self.mode == "RGB":
            return self.followed("gray")._replace(mode="L")
        return self._replace(mode=mode)

    def blended(self, base: Chain, factor: float) -> Chain | None:
        """Return the chain with an enhancement of its result.

        Args:
            base (Chain): The image to blend with: this chain followed by the enhancement with a
                factor of 0, or by a conversion to gray.
            factor (float): Factor of the enhancement.

        Returns:
            Chain | None: None if ``base`` is another image.
        """
        if base[:-2] != self[:-2] or base.mode != self.mode or not abs(factor) <= _FACTOR_MAX:
            return None
        if base.steps[:-1] != self.steps or not base.steps:
            return None
        name, value = base.steps[-1]
        if name == "gray":
            return self.followed("saturation", float(factor))
        if name in _BLENDS and value == 0:
            return self.followed(name, float(factor))
        return None

    @property
    def tested_steps(self) -> frozenset[str]:
        """Return the names of its steps in `TESTED_STEPS`."""
        if not self.steps and self.resize is None:
            return _NONE
        names = {name for name, _ in self.steps if name in TESTED_STEPS}
        resizes = [self.resize] + [value for name, value in self.steps if name == "resize"]
        if any(resize is not None and len(resize) > 3 for resize in resizes):
            names.add("part")
        return frozenset(names)

    def replay(self, open_image: Callable[[Any], Any], data: bytes) -> Any:
        """Return the image that Pillow makes by these calls."""
        image = open_image(io.BytesIO(data)).convert("RGB")
        image = image.crop(_corners(self.window))
        if self.resize is not None:
            image = _replay_step(image, "resize", self.resize)
            image = image.crop(_corners(self.crop))
        for step in self.steps:
            image = _replay_step(image, *step)
        image = _flip(image, self.flips_columns, self.flips_rows)
        return image.convert(self.mode)

    def __str__(self) -> str:
        parts = [f"window {self.window}"]
        if self.resize is not None:
            parts.append(_resize_text(self.resize))
            parts.append(f"crop {self.crop}")
        for name, value in self.steps:
            match name, value:
                case "resize", _:
                    parts.append(_resize_text(value))
                case "flip", (columns, rows):
                    parts += ["flip columns"] * columns + ["flip rows"] * rows
                case "gray" | "table", _:
                    parts.append(name)
                case _:
                    parts.append(f"{name} {value:.4g}" if name in _BLENDS else f"{name} {value}")
        parts += ["flip columns"] * self.flips_columns + ["flip rows"] * self.flips_rows
        return ", ".join(parts)


def _corners(box: Box) -> Box:
    left, top, width, height = box
    return left, top, left + width, top + height


def _resize_text(resize: Resize) -> str:
    width, height, resample, *part = resize
    of_part = f" of {tuple(part)}" if part else ""
    return f"resize{of_part} to {width}x{height} by filter {resample}"


def _replay_step(image: Any, name: str, value: Any) -> Any:
    from PIL import Image, ImageEnhance, ImageOps

    match name:
        case "brightness":
            return ImageEnhance.Brightness(image).enhance(value)
        case "contrast":
            return ImageEnhance.Contrast(image).enhance(value)
        case "saturation":
            return ImageEnhance.Color(image).enhance(value)
        case "gray":
            return image.convert("L").convert("RGB")
        case "hue":
            hue, saturation, brightness = image.convert("HSV").split()
            hue = hue.point([(old + value) % 256 for old in range(256)])
            return Image.merge("HSV", (hue, saturation, brightness)).convert("RGB")
        case "table":
            return image.point(list(value))
        case "crop":
            return image.crop(_corners(value))
        case "pad":
            return ImageOps.expand(image, value[:4], value[4:])
        case "resize":
            return image.resize(value[:2], value[2], value[3:] or None)
        case "flip":
            return _flip(image, *value)
    raise ValueError(f"name must be one of the steps of a chain, got {name!r}")


def _flip(image: Any, columns: bool, rows: bool) -> Any:
    from PIL.Image import Transpose

    if columns:
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
    if rows:
        image = image.transpose(Transpose.FLIP_TOP_BOTTOM)
    return image
