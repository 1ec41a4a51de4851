# SPDX-License-Identifier: Apache-2.0
"""The native kernels for images in one process, and the comparisons of their results with Pillow's.

A process uses them only if they pass a test when they start, and it stops using them at the first
difference: the pixels are Pillow's in every case.
"""

from __future__ import annotations

import io
import logging
import random
import threading
from collections.abc import Callable, Set
from typing import Any

import torch

from penstock import _C
from penstock.images import VARIABLE
from penstock.images.chains import TESTED_STEPS, Chain
from penstock.program_line import warn

logger = logging.getLogger(__name__)

COMPARED_FIRST = 8  # images of a process whose results are compared
COMPARED_FIRST_OF_OTHERS = 200  # the same with a Pillow whose version is in none of the tests
COMPARED_EVERY = 1000  # and one in so many later ones
TESTED_PILLOW = ("11.", "12.", "13.")
FILTERS = (1, 2, 3, 4, 5)  # Pillow's numbers of the filters that csrc/image has


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG = "png"  # beside the steps of chains in comparisons
_PNG_MODES = ("RGB", "RGBA", "L", "P")

_note: Callable[[str, bool], None] | None = None  # of an explanation


def set_note(note: Callable[[str, bool], None] | None) -> None:
    """Have :func:`tell` call ``note``."""
    global _note
    _note = note


def tell(what: str, is_native: bool = True) -> None:
    """Report a native step, or with False one for which Pillow needs the pixels."""
    if _note is not None:
        _note(what, is_native)


def is_png_file(data: bytes | memoryview) -> bool:
    """Return whether a file starts as a PNG file does."""
    return bytes(data[: len(_PNG_SIGNATURE)]) == _PNG_SIGNATURE


def _tested_parts(data: bytes, chain: Chain) -> Set[str]:
    """Return the names of what differs most between versions of Pillow, in this chain on a file."""
    return chain.tested_steps | {_PNG} if is_png_file(data) else chain.tested_steps


class Comparisons:
    """Which of a process's native results are compared with Pillow's. Thread-safe.

    The first ones are, also the first ones with each colour step and of PNG files; more of them if
    Pillow's version starts with none of the tested ones.

    Attributes:
        made (int): Native results.
        compared (int): Number of these that were compared.
    """

    def __init__(self, version: str, tested: tuple[str, ...]) -> None:
        self.made = self.compared = 0
        self._is_tested = version.startswith(tested)
        self._compares_first = True
        self._compared_of = dict.fromkeys((*TESTED_STEPS, _PNG), 0)
        self._lock = threading.Lock()

    def skip_first(self) -> None:
        """Compare no first results."""
        self._compares_first = False

    def is_next_due(self, parts: Set[str]) -> bool:
        """Return whether the next result is to be compared if it has these tested parts."""
        return self._is_due(self.made + 1, parts)

    def count(self, parts: Set[str]) -> bool:
        """Count a result; return whether it is to be compared."""
        with self._lock:
            self.made += 1
            is_due = self._is_due(self.made, parts)
            self.compared += is_due
            for part in parts if is_due else ():
                self._compared_of[part] += 1
            return is_due

    def _is_due(self, number: int, parts: Set[str]) -> bool:
        if number % COMPARED_EVERY == 0:
            return True
        first = COMPARED_FIRST if self._is_tested else COMPARED_FIRST_OF_OTHERS
        if not self._compares_first:
            return False
        compared = [self._compared_of[part] for part in parts]
        return number <= first or min(compared, default=first) < first


class NativeImages:
    """The kernels and their use. Thread-safe, like the transforms of a worker with threads.

    Attributes:
        comparisons (Comparisons): Images that were made natively.
        left (int): Images that Pillow had to make, because their files are damaged or unusual.
        tested_steps (frozenset[str]): Steps of chains that have Pillow's results.
        decodes_png (bool): Whether PNG files have Pillow's pixels.
        refusal (str): Why the kernels are no longer used; empty while they are.
    """

    def __init__(
        self, library: _C.JpegLibrary, open_image: Callable[[Any], Any], is_by_shrinkage: bool
    ) -> None:
        """Take Pillow's library and ``open``, and which side its resize treats first."""
        import PIL

        self.comparisons = Comparisons(PIL.__version__, TESTED_PILLOW)
        self.left = 0
        self.tested_steps: frozenset[str] = frozenset()
        self.decodes_png = False
        self.refusal = ""
        self._library = library
        self._open_image = open_image
        self._is_by_shrinkage = is_by_shrinkage

    @staticmethod
    def start(open_image: Callable[[Any], Any]) -> NativeImages | str:
        """Return the kernels for the Pillow of this process, or why it cannot use them."""
        import PIL._imaging

        try:
            library = _C.JpegLibrary(PIL._imaging.__file__)
        except Exception as error:
            return str(error)
        data = _test_file()
        for is_by_shrinkage in (True, False):
            images = NativeImages(library, open_image, is_by_shrinkage)
            if all(images._is_equal(data, chain) for chain in _TEST_CHAINS):
                images.tested_steps = frozenset(
                    name
                    for name, values in _TEST_STEPS.items()
                    if all(images._is_equal(data, _test_chain(name, value)) for value in values)
                )
                images.decodes_png = images._has_pillows_png()
                return images
        return "its results differ from the results of this version of Pillow"

    @property
    def is_used(self) -> bool:
        return not self.refusal

    def open(self, data: bytes) -> tuple[int, int, int, int] | None:
        """Return the width, height and channels of a JPEG or PNG file, and a number with which this
        thread makes it without opening it again; None if Pillow has to decode it.
        """
        if self.refusal:
            return None
        opened = self._library.open_bytes(data)
        if opened is None:
            self.left += 1
        return opened

    def make_bytes(self, data: bytes, number: int, chain: Chain) -> bytes:
        """Return the pixels of a chain: bytes [height][width][3]."""
        pixels = None if self.refusal else self._native_bytes(data, number, chain)
        if pixels is None:
            self.left += 1
            return self._replayed(data, chain)
        if self.comparisons.count(_tested_parts(data, chain)):
            replayed = self._replayed(data, chain)
            if pixels != replayed:
                self._refuse(chain)
                return replayed
        return pixels

    def make_planes(
        self, data: bytes, number: int, chain: Chain, tables: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the numbers of a chain as float32 [3, height, width], by a table for each colour.

        None if :meth:`make_bytes` has to be used.
        """
        parts = _tested_parts(data, chain)
        if self.refusal or self.comparisons.is_next_due(parts):
            return None
        planes = self._library.make_planes(data, number, chain, self._is_by_shrinkage, tables)
        if planes is not None:
            self.comparisons.count(parts)
        return planes

    def _native_bytes(self, data: bytes, number: int, chain: Chain) -> bytes | None:
        return self._library.make_bytes(data, number, chain, self._is_by_shrinkage)

    def _replayed(self, data: bytes, chain: Chain) -> bytes:
        return bytes(chain.replay(self._open_image, data).tobytes())

    def _is_equal(self, data: bytes, chain: Chain) -> bool:
        return self._native_bytes(data, 0, chain) == self._replayed(data, chain)

    def _has_pillows_png(self) -> bool:
        whole = Chain.of_image(_WIDTH, _HEIGHT)
        try:
            return all(self._is_equal(_test_file("PNG", mode), whole) for mode in _PNG_MODES)
        except Exception as error:  # Pillow may have no zlib
            logger.debug("PNG files are left to Pillow: %s: %s", type(error).__name__, error)
            return False

    def _refuse(self, chain: Chain) -> None:
        import PIL

        self.refusal = "a result differed from Pillow's"
        warn(
            f"a natively made image differs from the image by Pillow {PIL.__version__} ({chain}); "
            f"this worker continues with Pillow alone, and the batch has Pillow's pixels. Please "
            f"report this; {VARIABLE}=0 switches the native images off"
        )


_WIDTH, _HEIGHT = 61, 173
_TEST_CHAINS = (
    Chain.of_image(_WIDTH, _HEIGHT),
    Chain((3, 21, 40, 77), None, (0, 0, 40, 77), True),
    # Fewer rows, so that the order of the passes shows.
    *(Chain((1, 2, 55, 160), (50, 31, one), (4, 5, 40, 20), False, True) for one in FILTERS),
    *(Chain((0, 0, 61, 100), (97, 103, one), (0, 0, 97, 103)) for one in FILTERS),
)
_TEST_STEPS: dict[str, tuple[Any, ...]] = {
    "brightness": (0.7, 1.6),
    "contrast": (0.7, 1.6),
    "saturation": (0.7, 1.6, -0.5),
    "gray": (None,),
    "hue": (25, 240),
    "table": (bytes(range(255, -1, -1)) * 3,),
    "pad": ((1, 2, 3, 4, 50, 60, 70),),
    "part": tuple((40, 30, one, 7.5, 20, 50.25, 160.5) for one in FILTERS),
}


def _test_chain(name: str, value: Any) -> Chain:
    whole = Chain.of_image(_WIDTH, _HEIGHT)
    if name == "part":
        return whole._replace(resize=value, crop=(0, 0, *value[:2]))
    return whole.followed(name, value)


def _test_file(kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """Return a file of noise, the same in every process."""
    from PIL import Image

    noise = random.Random(0).randbytes(len(mode) * _WIDTH * _HEIGHT)
    image = Image.frombytes(mode, (_WIDTH, _HEIGHT), noise)
    if mode == "P":
        image.putpalette(noise[:768])
    file = io.BytesIO()
    image.save(file, kind, quality=90)
    return file.getvalue()
