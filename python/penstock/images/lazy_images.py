# SPDX-License-Identifier: Apache-2.0
"""Pillow's images whose pixels are made when they are needed.

`install` makes ``PIL.Image.open`` return such images for JPEG and PNG files, from the first one on,
at which the native kernels start. Crops, resizes, flips, tables and conversions of them are noted,
and made in one native call when the program reads pixels, as ``ToTensor`` does; `library_calls` has
functions that are noted, too. All other methods first make the pixels, and are then Pillow's.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import PIL
import torch
from PIL import Image, ImageFile, JpegImagePlugin, PngImagePlugin
from PIL.Image import Transpose

from penstock.images.chains import Chain
from penstock.images.native_images import FILTERS, NativeImages, is_png_file, tell

logger = logging.getLogger(__name__)
_starting = threading.RLock()
_images: NativeImages | str | None = None  # of this process once started; text: why it has none
_MARK = "penstock_original"  # of the function that takes the place of torchvision's
_SIDE_MAX = 1 << 24  # above which floats have no fractions
_FLIPS = {Transpose.FLIP_LEFT_RIGHT: (True, False), Transpose.FLIP_TOP_BOTTOM: (False, True)}


def install() -> str:
    """Have this process open JPEG and PNG files lazily; return why not, if it cannot. Idempotent.

    If another module opens the PNG files of this program, they are left to it.
    """
    if not isinstance(getattr(Image.Image, "im", None), property):
        return f"Pillow {PIL.__version__} has no images whose pixels can be made later"
    factory, accept = Image.OPEN["JPEG"]
    if factory is JpegImagePlugin.jpeg_factory:
        Image.register_open("JPEG", _open_jpeg, accept)
    elif factory is not _open_jpeg:
        return "another module opens the JPEG files of this program"
    factory, accept = Image.OPEN["PNG"]
    if factory is PngImagePlugin.PngImageFile:
        Image.register_open("PNG", _open_png, accept)
    return ""


def start() -> NativeImages | str:
    """Return the kernels of this process, or why it has none. Starts them at the first call."""
    global _images
    if _images is None:
        with _starting:
            if _images is None:
                # In the program's call of Image.open: no error may reach it.
                try:
                    _images = NativeImages.start(_open_plainly)
                except Exception as error:
                    _images = f"{type(error).__name__}: {error}"
                if isinstance(_images, str):
                    logger.debug("images are left to Pillow: %s", _images)
    return _images


def uninstall() -> None:
    """Undo `install`, `start`, `install_to_tensor` and the installations of `library_calls`."""
    global _images
    _images = None
    calls = sys.modules.get("penstock.images.library_calls")
    if calls is not None:
        calls.uninstall()
    factory, accept = Image.OPEN["JPEG"]
    if factory is _open_jpeg:
        Image.register_open("JPEG", JpegImagePlugin.jpeg_factory, accept)
    factory, accept = Image.OPEN["PNG"]
    if factory is _open_png:
        Image.register_open("PNG", PngImagePlugin.PngImageFile, accept)
    functional = sys.modules.get("torchvision.transforms.functional")
    original = getattr(getattr(functional, "to_tensor", None), _MARK, None)
    if functional is not None and original is not None:
        functional.to_tensor = original  # type: ignore[attr-defined]


def _open_plainly(file: io.BytesIO) -> Any:
    """Open a JPEG or PNG file as Pillow does."""
    is_png = is_png_file(file.getbuffer())
    return (PngImagePlugin.PngImageFile if is_png else JpegImagePlugin.jpeg_factory)(file)


def _open_jpeg(fp: Any, filename: Any = None) -> Any:
    started = start()
    image = JpegImagePlugin.jpeg_factory(fp, filename)
    is_plain = type(image) is JpegImagePlugin.JpegImageFile and image.mode in ("RGB", "L")
    if is_plain and isinstance(started, NativeImages):
        image.__class__ = LazyJpegFile
        tell(f"a JPEG file of {image.width}x{image.height}")
    return image


def _open_png(fp: Any, filename: Any = None) -> Any:
    started = start()
    image = PngImagePlugin.PngImageFile(fp, filename)
    is_plain = image.mode in ("RGB", "RGBA", "L", "P") and "transparency" not in image.info
    if is_plain and isinstance(started, NativeImages) and started.decodes_png:
        image.__class__ = LazyPngFile
        tell(f"a PNG file of {image.width}x{image.height}")
    return image


class LazyFile(ImageFile.ImageFile):
    """An opened file, until its pixels are read."""

    is_lazy_image = True
    _class_of_pillow: type[Any]

    def lazy(self) -> LazyImage | None:
        """Return the RGB image of the file; None if Pillow has to decode it now."""
        images = _images
        is_closed = self.fp is None  # as after verify()
        is_changed = self._im is not None or self.decoderconfig != () or len(self.tile) != 1
        if not isinstance(images, NativeImages) or is_closed or is_changed:
            return None
        if self.tile[0][1] != (0, 0, *self.size):
            return None
        try:
            data = self._take_file()
        except (OSError, ValueError, AttributeError):
            return None  # Pillow raises the exception
        opened = images.open(data)
        if opened is None or opened[:2] != self.size:
            return None
        tell("noted, for when the pixels are needed")
        whole = Chain.of_image(*self.size)
        return LazyImage.of(images, data, opened[3], whole, dict(self.info))

    def _take_file(self) -> bytes:
        """Read the file, and leave it as Pillow does after reading the pixels."""
        assert self.fp is not None
        if isinstance(self.fp, _Taken):
            return self.fp.getvalue()
        file = self.fp
        file.seek(0)
        data: bytes = file.read()
        if self._exclusive_fp and self._close_exclusive_fp_after_loading:
            file.close()
        self._set_file(_Taken(data))
        return data

    def _set_file(self, file: _Taken) -> None:
        self.fp = file

    def _become_plain(self) -> None:
        self.__class__ = self._class_of_pillow

    def load(self) -> Any:
        self._become_plain()
        return self.load()

    @property
    def im(self) -> Any:
        return super().im

    @im.setter
    def im(self, im: Any) -> None:
        if im is not None:  # by a method that changes the image in place, and has loaded it
            self.load()
        self._im = im

    def thumbnail(self, *arguments: Any, **named: Any) -> None:
        self._become_plain()
        self.thumbnail(*arguments, **named)

    def convert(self, mode: Any = None, *arguments: Any, **named: Any) -> Any:
        is_known = mode == "RGB" or (mode == "L" and self.mode in ("RGB", "L"))
        lazy = self.lazy() if is_known and not arguments and not named else None
        if lazy is None:
            return super().convert(mode, *arguments, **named)
        return lazy if mode == "RGB" else lazy.convert(mode)

    def crop(self, box: Any = None) -> Any:
        lazy = self.lazy() if self.mode == "RGB" else None
        return super().crop(box) if lazy is None else lazy.crop(box)

    def resize(self, size: Any, *arguments: Any, **named: Any) -> Any:
        lazy = self.lazy() if self.mode == "RGB" else None
        if lazy is None:
            return super().resize(size, *arguments, **named)
        return lazy.resize(size, *arguments, **named)

    def transpose(self, method: Any) -> Any:
        lazy = self.lazy() if self.mode == "RGB" and method in _FLIPS else None
        return super().transpose(method) if lazy is None else lazy.transpose(method)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._become_plain()
        return self.__reduce_ex__(protocol)


class LazyJpegFile(LazyFile, JpegImagePlugin.JpegImageFile):
    """A JPEG file."""

    _class_of_pillow = JpegImagePlugin.JpegImageFile


class LazyPngFile(LazyFile, PngImagePlugin.PngImageFile):
    """A PNG file without transparent colours."""

    _class_of_pillow = PngImagePlugin.PngImageFile

    def _set_file(self, file: _Taken) -> None:
        super()._set_file(file)
        if self.png is not None:
            self.png.fp = file  # with which Pillow reads the rest


LazyJpegFile.__name__ = LazyJpegFile.__qualname__ = "JpegImageFile"
LazyPngFile.__name__ = LazyPngFile.__qualname__ = "PngImageFile"


class _Taken(io.BytesIO):
    """The bytes of a file that has been read for a lazy image."""


class LazyImage(Image.Image):
    """An image of mode RGB or L that is a chain of calls on a JPEG or PNG file.

    It becomes an image of Pillow's class ``Image`` when its pixels are needed.
    """

    is_lazy_image = True
    _images: NativeImages
    _data: bytes  # of the file
    _number: int  # with which it has been opened
    _is_held = False
    _chain: Chain

    @staticmethod
    def of(
        images: NativeImages, data: bytes, number: int, chain: Chain, info: dict[Any, Any]
    ) -> LazyImage:
        image = LazyImage()
        image._images, image._data, image._number, image._chain = images, data, number, chain
        image._mode, image._size = chain.mode, chain.size
        image.info = info
        return image

    @property
    def im(self) -> Any:
        return self._make().im

    @im.setter
    def im(self, im: Any) -> None:
        self._im = im
        if im is not None:  # rather than at the start of Pillow's constructor
            self._become_plain()

    def load(self) -> Any:
        return None if self._is_held else self._make().load()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context: ``load()`` does not make the pixels, for a function that may not need them."""
        self._is_held = True
        try:
            yield
        finally:
            del self._is_held

    def _make(self) -> Image.Image:
        pixels = self.made_bytes()
        tell("Pillow's own code reads the pixels", False)
        self._become_plain()
        self._im = Image.core.new(self._mode, self._size)  # type: ignore[attr-defined]
        self.frombytes(pixels)
        return self

    def _become_plain(self) -> None:
        for name in ("_images", "_data", "_number", "_chain"):
            self.__dict__.pop(name, None)
        self.__class__ = Image.Image  # type: ignore[assignment]

    def made_bytes(self) -> bytes:
        """Return the pixels without keeping them."""
        tell(f"makes the pixels: {self._chain}")
        return self._images.make_bytes(self._data, self._number, self._chain)

    def made_planes(self, tables: torch.Tensor) -> torch.Tensor | None:
        """Return float32 [3, height, width] without keeping the pixels; None if they are needed."""
        width, height = self._size
        if self._mode != "RGB" or width == 1 or height == 1:  # torchvision's strides are others
            return None
        tell(f"makes float32 [3, {height}, {width}]: {self._chain}")
        return self._images.make_planes(self._data, self._number, self._chain, tables)

    def _with(self, chain: Chain, info: dict[Any, Any] | None = None) -> LazyImage:
        tell("noted, for when the pixels are needed")
        info = dict(self.info) if info is None else info
        return LazyImage.of(self._images, self._data, self._number, chain, info)

    def _noted(self, chain: Chain | None, info: dict[Any, Any] | None = None) -> LazyImage | None:
        """Return the image of a chain; None if the kernels do not have Pillow's result for it."""
        if chain is None or not chain.tested_steps <= self._images.tested_steps:
            return None
        return self._with(chain, info)

    # For library_calls: the image after a step, with the `info` of Pillow's result; None if Pillow
    # has to make it.
    def _followed(self, name: str, value: Any) -> LazyImage | None:
        return self._noted(self._chain.followed(name, value), {})

    def _gray(self) -> LazyImage | None:
        return self._noted(self._chain.converted("L").converted("RGB"), {})

    def _padded(self, widths: tuple[int, ...], colour: tuple[int, ...]) -> LazyImage | None:
        left, top, right, bottom = widths
        red, green, blue = colour
        chain = self._chain.padded(left, top, right, bottom, (red, green, blue))
        return self._noted(chain, {})

    def _blended(self, base: LazyImage, factor: float) -> LazyImage | None:
        if base._data is not self._data:
            return None
        return self._noted(self._chain.blended(base._chain, factor), dict(base.info))

    def copy(self) -> Any:
        return self._with(self._chain)

    __copy__ = copy

    def convert(self, mode: Any = None, *arguments: Any, **named: Any) -> Any:
        noted = None
        if mode in ("RGB", "L") and not arguments and not named:
            noted = self._noted(self._chain.converted(mode))
        return super().convert(mode, *arguments, **named) if noted is None else noted

    def crop(self, box: Any = None) -> Any:
        corners = None if box is None else _whole_numbers(box, 4)
        noted = None if corners is None else self._noted(self._chain.cropped(*corners))
        return super().crop(box) if noted is None else noted

    def point(self, lut: Any, mode: Any = None) -> Any:
        bands = len(self._mode)
        if callable(lut) and not isinstance(lut, Image.ImagePointHandler):
            lut = [lut(value) for value in range(256)] * bands
        noted = None
        if mode is None and isinstance(lut, (list, tuple)) and len(lut) == 256 * bands:
            try:
                table = bytes(lut)
            except (TypeError, ValueError):  # other numbers than bytes
                pass
            else:
                table *= 3 // bands
                noted = self._noted(self._chain.followed("table", table))
        return super().point(lut, mode) if noted is None else noted

    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        resample = Image.Resampling.BICUBIC if resample is None else resample
        part = None if box is None else _corners(box)
        is_usual = resample in FILTERS and reducing_gap is None
        if is_usual and (box is None or part is not None):
            wanted = _whole_numbers(size, 2)
            if wanted is not None and wanted == self._size and part in (None, (0, 0, *self._size)):
                return self.copy()
            if wanted is not None:
                chain = self._chain.resized(wanted[0], wanted[1], int(resample), part)
                noted = self._noted(chain)
                if noted is not None:
                    return noted
        return super().resize(size, resample, box, reducing_gap)

    def transpose(self, method: Any) -> Any:
        if method in _FLIPS:
            return self._with(self._chain.flipped(*_FLIPS[method]))
        return super().transpose(method)

    def tobytes(self, encoder_name: str = "raw", *arguments: Any) -> bytes:
        if encoder_name == "raw" and not arguments:
            return self.made_bytes()
        return super().tobytes(encoder_name, *arguments)

    def __eq__(self, other: object) -> bool:
        for one in (self, other):
            if isinstance(one, LazyImage):
                one._make()
        return Image.Image.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # as Pillow's

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._make().__reduce_ex__(protocol)


LazyImage.__name__ = LazyImage.__qualname__ = "Image"


def _corners(box: Any) -> tuple[float, float, float, float] | None:
    """Return the numbers of a box as Pillow's C code has them; None if it may refuse them."""
    if not isinstance(box, tuple) or len(box) != 4:
        return None
    if not all(isinstance(one, (int, float)) and abs(one) < _SIDE_MAX for one in box):
        return None
    left, top, right, bottom = (struct.unpack("f", struct.pack("f", one))[0] for one in box)
    return left, top, right, bottom


def _whole_numbers(values: Any, count: int) -> tuple[int, ...] | None:
    """Return a tuple of ints; None if there are not ``count``, or if one is no whole number."""
    try:
        found = tuple(values)
        whole = tuple(map(int, found))
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if len(found) == count and whole == found else None


def install_to_tensor() -> None:
    """Have torchvision's ``to_tensor`` read lazy images without intermediate copies. Idempotent."""
    functional = sys.modules.get("torchvision.transforms.functional")
    original: Callable[[Any], torch.Tensor] | None = getattr(functional, "to_tensor", None)
    if functional is None or original is None or hasattr(original, _MARK):
        return

    @functools.cache
    def tables() -> torch.Tensor | None:
        ramp = bytes(value for value in range(256) for _ in range(3))
        # By the function itself, which makes the same numbers; no error may reach the program.
        try:
            made = original(Image.frombytes("RGB", (256, 1), ramp))
        except Exception as error:
            logger.debug("to_tensor is left as it is: %s: %s", type(error).__name__, error)
            return None
        is_usual = made.shape == (3, 1, 256) and made.dtype is torch.float32 and made.is_cpu
        return made.contiguous() if is_usual else None

    @functools.wraps(original)
    def to_tensor(pic: Any) -> torch.Tensor:
        if type(pic) is LazyImage and torch.get_default_dtype() is torch.float32:
            of_bytes = tables()
            planes = None if of_bytes is None else pic.made_planes(of_bytes)
            if planes is not None:
                return planes
        return original(pic)

    setattr(to_tensor, _MARK, original)
    functional.to_tensor = to_tensor  # type: ignore[attr-defined]
