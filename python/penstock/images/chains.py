# SPDX-License-Identifier: Apache-2.0
"""Chains of Pillow's calls on a JPEG image, in the form in which csrc/image carries them out."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

Box = tuple[int, int, int, int]  # left, top, width, height


class Chain(NamedTuple):
    """A crop, a resize, another crop, and flips; each may be missing.

    Attributes:
        window (Box): Part of the file's image.
        resize (tuple[int, int, int] | None): Width, height and filter, by Pillow's number.
        crop (Box): Part of the resized image, or of the window.
        flips_columns (bool): Whether the result is mirrored left to right.
        flips_rows (bool): Whether the result is mirrored top to bottom.
    """

    window: Box
    resize: tuple[int, int, int] | None
    crop: Box
    flips_columns: bool = False
    flips_rows: bool = False

    @staticmethod
    def of_image(width: int, height: int) -> Chain:
        """Return the chain of a whole image."""
        whole = (0, 0, width, height)
        return Chain(whole, None, whole)

    @property
    def size(self) -> tuple[int, int]:
        """Return the width and the height of the result."""
        return self.crop[2], self.crop[3]

    def cropped(self, left: int, top: int, right: int, bottom: int) -> Chain | None:
        """Return the chain with a crop of its result; None if the crop is empty or not within."""
        width, height = self.size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            return None
        if self.flips_columns:
            left, right = width - right, width - left
        if self.flips_rows:
            top, bottom = height - bottom, height - top
        size = (right - left, bottom - top)
        if self.resize is None:
            window = (self.window[0] + left, self.window[1] + top, *size)
            return self._replace(window=window, crop=(0, 0, *size))
        return self._replace(crop=(self.crop[0] + left, self.crop[1] + top, *size))

    def resized(self, width: int, height: int, resample: int) -> Chain | None:
        """Return the chain with a resize of its result; None after another resize, or a flip."""
        if self.resize is not None or self.flips_columns or self.flips_rows:
            return None
        if width < 1 or height < 1:
            return None
        return self._replace(resize=(width, height, resample), crop=(0, 0, width, height))

    def flipped(self, columns: bool, rows: bool) -> Chain:
        """Return the chain with its result mirrored."""
        return self._replace(
            flips_columns=self.flips_columns != columns, flips_rows=self.flips_rows != rows
        )

    def replay(self, open_image: Callable[[Any], Any], data: bytes) -> Any:
        """Return the image that Pillow makes by these calls."""
        from PIL.Image import Transpose

        image = open_image(io.BytesIO(data)).convert("RGB")
        image = image.crop(_corners(self.window))
        if self.resize is not None:
            width, height, resample = self.resize
            image = image.resize((width, height), resample)
            image = image.crop(_corners(self.crop))
        if self.flips_columns:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        if self.flips_rows:
            image = image.transpose(Transpose.FLIP_TOP_BOTTOM)
        return image

    def __str__(self) -> str:
        parts = [f"window {self.window}"]
        if self.resize is not None:
            parts.append("resize to {}x{} by filter {}".format(*self.resize))
            parts.append(f"crop {self.crop}")
        parts += ["flip columns"] * self.flips_columns + ["flip rows"] * self.flips_rows
        return ", ".join(parts)


def _corners(box: Box) -> Box:
    left, top, width, height = box
    return left, top, left + width, top + height
