# SPDX-License-Identifier: Apache-2.0
"""Tensors of JPEG files that torchvision decodes, of which only the used part is decoded.

`install` makes ``torchvision.io.decode_jpeg``, ``decode_image`` and ``read_image`` return such
tensors. A crop of one decodes its window alone, into memory of the whole image, so that its strides
and its storage are torchvision's. Everything else first decodes the whole image.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import torch

from penstock import _C
from penstock.compat.wrapper_tensors import (
    DisableTorchFunctionSubclass,
    pixels_without_memory,
    tree_map,
)
from penstock.images import VARIABLE
from penstock.images.chains import Box
from penstock.images.native_images import TESTED_TORCHVISION, Comparisons, tell
from penstock.program_line import warn

_MODES = (0, 3)  # UNCHANGED and RGB, by torchvision.io.ImageReadMode
_JPEG_START = [0xFF, 0xD8, 0xFF]
_OPERATORS = ("decode_jpeg", "decode_image")

_decoder: TensorDecoder | None = None  # of this process, once installed


def install() -> TensorDecoder | str:
    """Have this process decode JPEG files lazily; return why not, if it cannot. Idempotent."""
    global _decoder
    if _decoder is not None:
        return _decoder
    started = TensorDecoder.start()
    if isinstance(started, str):
        return started
    for name in _OPERATORS:
        setattr(torch.ops.image, name, _LazyOperator(getattr(torch.ops.image, name)))
    _decoder = started
    return started


def uninstall() -> None:
    """Undo `install`."""
    global _decoder
    _decoder = None
    for name in _OPERATORS:
        operator = getattr(torch.ops.image, name)
        if isinstance(operator, _LazyOperator):
            setattr(torch.ops.image, name, operator.original)


class _LazyOperator:
    """Takes the place of an operator in ``torch.ops.image``."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, data: Any, mode: int = 0, apply_exif: bool = False) -> Any:
        whole = functools.partial(self.original, data, mode, apply_exif)
        lazy = None
        if _decoder is not None and mode in _MODES and not apply_exif:
            lazy = _decoder.lazy(data, whole, is_unchanged=mode == 0)
        return whole() if lazy is None else lazy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class TensorDecoder:
    """torchvision's libjpeg-turbo. Thread-safe.

    Attributes:
        comparisons (Comparisons): Windows that were decoded.
        refusal (str): Why windows are no longer decoded; empty while they are.
    """

    def __init__(self, library: _C.JpegLibrary, version: str) -> None:
        """Take torchvision's library, and torchvision's version."""
        self.refusal = ""
        self.comparisons = Comparisons(version, TESTED_TORCHVISION)
        self._library = library

    @staticmethod
    def start() -> TensorDecoder | str:
        """Return the decoder for the torchvision of this process, or why it cannot be used."""
        import torchvision.io  # type: ignore[import-untyped]  # loads the operators

        paths = [
            path
            for path in torch.ops.loaded_libraries
            if os.path.basename(path).startswith("image") and "torchvision" in path
        ]
        if len(paths) != 1 or not hasattr(torch.ops.image, "encode_jpeg"):
            return f"torchvision {torchvision.__version__} has no operators for images"
        try:
            library = _C.JpegLibrary(paths[0])
        except Exception as error:
            return str(error)
        decoder = TensorDecoder(library, torchvision.__version__)
        # By the operators, since their functions warn that they are deprecated; and on the CPU even
        # if the program has another default device.
        noise = torch.frombuffer(
            bytearray(random.Random(0).randbytes(3 * 61 * 83)), dtype=torch.uint8
        )
        file = torch.ops.image.encode_jpeg(noise.view(3, 61, 83), 90)
        whole = torch.ops.image.decode_jpeg(file, 0, False)
        for window in ((0, 0, 83, 61), (7, 5, 40, 31), (66, 50, 17, 11)):
            part = decoder._decoded(file, 0, (83, 61), window)
            if part is None or not torch.equal(part, _cut(whole, window)):
                return f"its results differ from torchvision {torchvision.__version__}"
        return decoder

    def lazy(
        self, data: Any, whole: Callable[[], torch.Tensor], *, is_unchanged: bool
    ) -> LazyTensor | None:
        """Return the lazy image of a file; None if torchvision has to decode it.

        ``whole`` decodes it by torchvision. With ``is_unchanged``, gray files are left to it.
        """
        if self.refusal or type(data) is not torch.Tensor or data.dtype != torch.uint8:
            return None
        if data.dim() != 1 or not data.is_contiguous() or data.device.type != "cpu":
            return None
        if data[:3].tolist() != _JPEG_START:
            return None
        opened = self._library.open_tensor(data)
        if opened is None or (is_unchanged and opened[2] != 3):
            return None
        tell(f"a JPEG file of {opened[0]}x{opened[1]}")
        return LazyTensor(self, data, opened, whole)

    def window(self, lazy: LazyTensor, window: Box) -> torch.Tensor | None:
        """Return uint8 [3, height, width] of a window, a view into memory of the whole image;
        None if torchvision has to decode it."""
        if self.refusal:
            return None
        _, height, width = lazy.shape
        part = self._decoded(lazy.file, lazy.number, (width, height), window)
        if part is not None and self.comparisons.count():
            expected = _cut(lazy.whole_tensor(), window)
            if not torch.equal(part, expected):
                self._refuse(window)
            return expected
        return part

    def _decoded(
        self, data: torch.Tensor, number: int, size: tuple[int, int], window: Box
    ) -> torch.Tensor | None:
        whole = self._library.decode_tensor(data, number, *size, window)
        return None if whole is None else _cut(whole, window)

    def _refuse(self, window: Box) -> None:
        import torchvision

        self.refusal = "a result differed from torchvision's"
        warn(
            f"a window {window} of a JPEG file differs from the image by torchvision "
            f"{torchvision.__version__}; this worker continues with torchvision alone, and the "
            f"batch has torchvision's pixels. Please report this; {VARIABLE}=0 switches native "
            "images off"
        )


def _cut(image: torch.Tensor, window: Box) -> torch.Tensor:
    left, top, width, height = window
    return image[..., top : top + height, left : left + width]


_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in "shape ndim dtype device layout".split()),
    *(getattr(torch.Tensor, name).__get__ for name in "is_cuda requires_grad is_sparse".split()),
    *(getattr(torch.Tensor, name) for name in "size dim numel nelement ndimension stride".split()),
    *(getattr(torch.Tensor, name) for name in "is_floating_point is_complex is_pinned".split()),
}


class LazyTensor(torch.Tensor):
    """uint8 [3, height, width] without memory. Every use but a crop first makes the real tensor,
    and is then one of that."""

    is_lazy_image = True
    file: torch.Tensor  # the bytes of the file
    number: int  # with which it has been opened
    _decoder: TensorDecoder
    _whole: Callable[[], torch.Tensor]
    _real: torch.Tensor | None

    def __new__(
        cls,
        decoder: TensorDecoder,
        file: torch.Tensor,
        opened: tuple[int, int, int, int],
        whole: Callable[[], torch.Tensor],
    ) -> LazyTensor:
        width, height, _, number = opened
        lazy: LazyTensor = pixels_without_memory(cls, height, width)
        lazy.file, lazy.number = file, number
        lazy._decoder, lazy._whole, lazy._real = decoder, whole, None
        return lazy

    def whole_tensor(self) -> torch.Tensor:
        """Return the tensor that torchvision makes."""
        if self._real is None:
            self._real = self._whole()
        return self._real

    def _part(self, index: Any) -> torch.Tensor | None:
        """Return the crop ``self[..., rows, columns]``; None for another index."""
        if self._real is not None or type(index) is not tuple or len(index) != 3:
            return None
        if index[0] is not Ellipsis and index[0] != slice(None):
            return None
        _, height, width = self.shape
        bounds = []
        for one, size in zip(index[1:], (height, width), strict=True):
            if type(one) is not slice:
                return None
            try:
                start, stop, step = one.indices(size)
            except TypeError:
                return None  # torch has rules for other numbers
            if step != 1 or stop <= start:
                return None
            bounds.append((start, stop - start))
        (top, rows), (left, columns) = bounds
        part = self._decoder.window(self, (left, top, columns, rows))
        if part is not None:
            tell(f"decodes {columns}x{rows} at ({left}, {top}) alone")
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == torch.Tensor.__getitem__ and type(args[0]) is LazyTensor:
            part = args[0]._part(args[1])
            if part is not None:
                return part
        tell("torchvision decodes the whole image", False)
        return func(*_real_ones(args), **_real_ones(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_real_ones(args), **_real_ones(kwargs or {}))


def _real_ones(values: Any) -> Any:
    return tree_map(lambda one: one.whole_tensor() if type(one) is LazyTensor else one, values)
