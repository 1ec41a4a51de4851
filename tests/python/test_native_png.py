# SPDX-License-Identifier: Apache-2.0
"""PNG files decoded natively have Pillow's pixels; others are Pillow's, and its exceptions.

The oracle is Pillow itself, and torch's DataLoader over the same program.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image, ImageFile, ImageOps, PngImagePlugin
from stream_oracle import describe
from test_native_images import photograph, random_call
from torchvision import datasets, transforms
from torchvision.transforms import v2

from penstock import DataLoader, explain_sample
from penstock.images import lazy_images, library_calls, native_images
from penstock.images.native_images import NativeImages

COLOURS = {"L": 0, "RGB": 2, "P": 3, "RGBA": 6}
OPENERS = (lazy_images._open_jpeg, lazy_images._open_png)
BANDS = {"L": 1, "RGB": 3, "P": 1, "RGBA": 4}
SIZES = ((1, 1), (1, 9), (9, 1), (2, 3), (5, 4), (16, 16), (17, 33), (64, 5), (131, 77))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png_of(
    width: int,
    height: int,
    mode: str = "RGB",
    *,
    rows: bytes | None = None,
    filters: tuple[int, ...] = (0, 1, 2, 3, 4),
    header: bytes = b"\x08%c\0\0\0",
    before: bytes = b"",
    behind: bytes = b"",
    parts: int = 1,
    seed: int = 0,
) -> bytes:
    """Return a PNG file whose rows have these filters in turn, and arbitrary bytes behind them."""
    draw = random.Random(seed)
    if rows is None:
        size = width * BANDS[mode]
        rows = b"".join(
            bytes([filters[y % len(filters)]]) + draw.randbytes(size) for y in range(height)
        )
    packed = zlib.compress(rows, draw.choice((0, 1, 6, 9)))
    cuts = sorted(draw.sample(range(len(packed)), parts - 1))
    pieces = [packed[a:b] for a, b in zip([0, *cuts], [*cuts, len(packed)], strict=True)]
    palette = chunk(b"PLTE", draw.randbytes(768)) if mode == "P" else b""
    head = struct.pack(">II", width, height) + header.replace(b"%c", bytes([COLOURS[mode]]))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", head),
            before,
            palette,
            *(chunk(b"IDAT", piece) for piece in pieces),
            behind,
            chunk(b"IEND"),
        ]
    )


def opened(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


def by_pillow(data: bytes) -> Any:
    return PngImagePlugin.PngImageFile(io.BytesIO(data))


def facts(image: Any) -> Any:
    return image.mode, image.size, image.tobytes(), dict(image.info), image.format


def outcome(data: bytes) -> Any:
    """Return the image that a program reads from a file, or its exception."""
    try:
        return facts(opened(data).convert("RGB").resize((7, 5), Image.Resampling.BILINEAR))
    except Exception as error:
        return type(error), str(error).partition(" at 0x")[0]


@contextlib.contextmanager
def natively(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeImages]:
    """Context: files are opened lazily, and native images are not compared by themselves."""
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 0)
    assert lazy_images.install() == ""
    started = lazy_images.start()
    try:
        assert isinstance(started, NativeImages), started
        yield started
    finally:
        lazy_images.uninstall()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeImages]:
    with natively(monkeypatch) as started:
        assert started.decodes_png
        yield started
        assert started.is_used


@pytest.fixture
def left(kernels: NativeImages) -> list[int]:
    """The number of images that were left to Pillow before the test."""
    return [kernels.left]


@pytest.mark.parametrize("mode", COLOURS)
@pytest.mark.parametrize("filters", [(0,), (1,), (2,), (3,), (4,), (4, 3, 2, 1, 0)], ids=str)
def test_each_filter_gives_pillows_pixels(
    kernels: NativeImages,
    left: list[int],
    mode: str,
    filters: tuple[int, ...],
) -> None:
    for seed, (width, height) in enumerate(SIZES):
        data = png_of(width, height, mode, filters=filters, seed=seed, parts=1 + seed % 3)
        ours = opened(data).convert("RGB")
        assert type(ours) is lazy_images.LazyImage
        assert facts(ours) == facts(by_pillow(data).convert("RGB"))
    assert kernels.left == left[0]


@pytest.mark.parametrize("mode", COLOURS)
def test_chains_of_calls_have_pillows_pixels(
    kernels: NativeImages,
    left: list[int],
    mode: str,
) -> None:
    draw = random.Random(mode)
    for number in range(60):
        file = io.BytesIO()
        size = (draw.randint(1, 200), draw.randint(1, 200))
        photograph(*size, number).convert(mode).save(file, "PNG", compress_level=draw.randrange(10))
        data = file.getvalue()
        ours, theirs = opened(data).convert("RGB"), by_pillow(data).convert("RGB")
        for _ in range(draw.randint(0, 5)):
            name, arguments = random_call(draw, theirs.size)
            ours, theirs = getattr(ours, name)(*arguments), getattr(theirs, name)(*arguments)
        assert facts(ours) == facts(theirs)
    assert kernels.left == left[0]


def test_image_file_without_a_conversion_is_lazy_if_it_is_rgb(
    kernels: NativeImages,
    left: list[int],
) -> None:
    data = png_of(40, 30)
    assert opened(data).crop((1, 2, 30, 20)).tobytes() == (
        by_pillow(data).crop((1, 2, 30, 20)).tobytes()
    )
    assert kernels.comparisons.made > 0
    for mode in ("L", "RGBA", "P"):
        image = opened(png_of(40, 30, mode))
        assert image.crop((0, 0, 9, 9)).mode == mode


OTHERS: dict[str, dict[str, Any]] = {
    "interlaced": {"header": b"\x08%c\0\0\1"},
    "16 bits": {"header": b"\x10%c\0\0\0", "rows": bytes(20 * (1 + 2 * 3 * 30))},
    "transparent colour": {"before": chunk(b"tRNS", bytes(6))},
    "text behind the pixels": {"behind": chunk(b"tEXt", b"Title\0later")},
    "too many rows": {"rows": bytes(21 * 91)},
    "too few rows": {"rows": bytes(19 * 91)},
    "unknown filter": {"filters": (0, 1, 5)},
    "unknown filter at the end": {"filters": (*[0] * 19, 9)},
    "wrong checksum": {"before": chunk(b"gAMA", bytes(4))[:-1] + b"x"},
}


@pytest.mark.parametrize("case", OTHERS)
def test_unusual_files_are_pillows(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    data = png_of(30, 20, **OTHERS[case])
    expected = outcome(data)
    with natively(monkeypatch) as started:
        assert outcome(data) == expected
        assert started.comparisons.made == 0 or case == "16 bits"  # of the resize that follows


def test_chunks_before_the_pixels_stay_in_the_information(
    kernels: NativeImages,
    left: list[int],
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    info = PngImagePlugin.PngInfo()
    info.add_text("Title", "a title")
    file = io.BytesIO()
    photograph(50, 40).save(file, "PNG", exif=exif, pnginfo=info, dpi=(72, 72), icc_profile=b"icc")
    data = file.getvalue()
    assert facts(opened(data).convert("RGB")) == facts(by_pillow(data).convert("RGB"))
    ours, theirs = (ImageOps.exif_transpose(make(data)) for make in (opened, by_pillow))
    assert facts(ours) == facts(theirs)
    assert kernels.left == left[0]


@pytest.mark.parametrize("mode", COLOURS)
@pytest.mark.parametrize("is_truncated_allowed", [False, True])
def test_damaged_files_have_pillows_outcome(
    monkeypatch: pytest.MonkeyPatch, mode: str, is_truncated_allowed: bool
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", is_truncated_allowed)
    draw = random.Random(mode)
    cases = []
    for number in range(60):
        data = bytearray(png_of(40, 25, mode, parts=1 + number % 3, seed=number))
        if number % 2:
            del data[draw.randrange(8, len(data)) :]
        else:
            data[draw.randrange(8, len(data))] ^= 1 << draw.randrange(8)
        cases.append(bytes(data))
    expected = [outcome(data) for data in cases]
    with natively(monkeypatch):
        assert [outcome(data) for data in cases] == expected


def test_file_is_closed_and_loads_later(kernels: NativeImages, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(png_of(40, 30, parts=3))
    image = Image.open(path)
    file = image.fp
    lazy = image.convert("RGB")
    assert file.closed
    assert lazy.tobytes() == by_pillow(path.read_bytes()).tobytes()
    assert image.tobytes() == lazy.tobytes()  # by Pillow, from the bytes that were read
    again = pickle.loads(pickle.dumps(Image.open(path)))
    assert type(again) is PngImagePlugin.PngImageFile
    Image.open(path).verify()


@pytest.mark.parametrize("orientation", [*range(1, 9), None])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_are_turned_by_their_orientation(
    kernels: NativeImages, tmp_path: Path, orientation: int | None, kind: str
) -> None:
    library_calls.install()
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    exif[0x0110] = "a camera"
    path = tmp_path / "one"
    photograph(50, 40).save(path, kind, exif=exif)

    def turned(is_converted: bool) -> list[Any]:
        image = Image.open(path)
        image = ImageOps.exif_transpose(image.convert("RGB") if is_converted else image)
        is_lazy = type(image) is lazy_images.LazyImage
        assert is_lazy == (orientation in (None, 1, 2, 4) and Image.OPEN[kind][0] in OPENERS)
        small = image.crop((3, 2, 31, 29)).resize((11, 13), Image.Resampling.BILINEAR)
        again = ImageOps.exif_transpose(image)
        return [*map(facts, (image, small, again)), dict(image.getexif())]

    ours = [turned(one) for one in (False, True)]
    lazy_images.uninstall()
    assert ours == [turned(one) for one in (False, True)]


IN_PLACE = {
    "thumbnail": lambda image: image.thumbnail((17, 17)),
    "turned by its orientation": lambda image: ImageOps.exif_transpose(image, in_place=True),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_file_changed_in_place_keeps_the_change(
    kernels: NativeImages, tmp_path: Path, change: str, orientation: int, kind: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "one"
    photograph(50, 40).save(path, kind, exif=exif)

    def changed() -> Any:
        image = Image.open(path)
        IN_PLACE[change](image)
        image.load()
        text = image.text if kind == "PNG" else None
        return facts(image), facts(image.convert("RGB")), text, image.getpixel((0, 0))

    ours = changed()
    lazy_images.uninstall()
    assert ours == changed()


def test_bombs_raise_pillows_exception(
    kernels: NativeImages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(Image.DecompressionBombError):
        opened(png_of(40, 30))
    with pytest.warns(Image.DecompressionBombWarning):
        opened(png_of(30, 20))


class Folder(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path, transform: Any) -> None:
        self.images = datasets.ImageFolder(str(folder), transform)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index]


CHAINS = {
    "v1": transforms.Compose(
        [
            transforms.RandomResizedCrop(48),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.25] * 3),
        ]
    ),
    "v2": v2.Compose(
        [
            v2.RandomCrop(40, padding=4, pad_if_needed=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    for number in range(48):
        mode = list(COLOURS)[number % 4]
        width, height = 40 + 3 * number, 150 - number
        path = tmp_path / "one" / f"{number:02}.png"
        if number % 3:
            photograph(width, height, number).convert(mode).save(path)
        else:
            path.write_bytes(png_of(width, height, mode, seed=number))
    return tmp_path


@pytest.mark.parametrize("chain", CHAINS)
def test_loaders_batches_are_torchs(folder: Path, chain: str) -> None:
    dataset = Folder(folder, CHAINS[chain])

    def stream(make: Any) -> Any:
        torch.manual_seed(2)
        loader = make(dataset, batch_size=8, shuffle=True, num_workers=2)
        return [describe(batch) for batch in loader]

    expected = stream(torch.utils.data.DataLoader)
    assert stream(DataLoader) == expected


def test_threads_decode_at_a_time(folder: Path) -> None:
    shown = [transforms.Resize(40), transforms.CenterCrop(40), transforms.ToTensor()]
    dataset = Folder(folder, transforms.Compose(shown))
    expected = [describe(one) for one in torch.utils.data.DataLoader(dataset, batch_size=8)]
    loader = DataLoader(dataset, batch_size=8, num_workers=2, fetch_threads=3)
    assert [describe(one) for one in loader] == expected


def test_explanation_names_png_files(folder: Path) -> None:
    plan = explain_sample(Folder(folder, CHAINS["v1"]))
    assert "a PNG file of" in str(plan)
    assert sum(step.is_native for step in plan.steps) >= 4


def test_other_modules_png_files_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(fp: Any, filename: Any = None) -> Any:
        return PngImagePlugin.PngImageFile(fp, filename)

    monkeypatch.setitem(Image.OPEN, "PNG", (theirs, Image.OPEN["PNG"][1]))
    assert lazy_images.install() == ""
    try:
        assert type(opened(png_of(9, 9))) is PngImagePlugin.PngImageFile
    finally:
        lazy_images.uninstall()
    assert Image.OPEN["PNG"][0] is theirs


def test_numbers_of_pixels_are_those_of_numpy(kernels: NativeImages) -> None:
    data = png_of(33, 21, "RGBA")
    ours, theirs = (np.asarray(make(data).convert("RGB")) for make in (opened, by_pillow))
    assert np.array_equal(ours, theirs)
