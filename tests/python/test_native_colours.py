# SPDX-License-Identifier: Apache-2.0
"""Colours, borders and further resizes that are made natively have Pillow's pixels.

The oracle is Pillow itself with torchvision's transforms, and torch's DataLoader over the same
program.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transpose
from test_native_images import by_pillow, folder, images, jpeg_of, opened, photograph  # noqa: F401
from torchvision import datasets, transforms
from torchvision.transforms import functional, v2

from penstock import _C, DataLoader
from penstock.images import lazy_images, library_calls, native_images
from penstock.images.chains import TESTED_STEPS, Chain
from penstock.images.lazy_images import LazyImage
from penstock.images.native_images import NativeImages

SIZES = ((1, 1), (1, 9), (7, 5), (64, 33), (401, 300))
FACTORS: tuple[Any, ...] = (
    0, 0.0, 1, 1.0, True, 0.3, 0.999999, 1.4, -0.7, 25.0, -1000, 1e6, np.float64(0.6),
    np.float32(1.7), Fraction(2, 3), 1e7, -1e30, math.inf,
)  # fmt: skip


@pytest.fixture(autouse=True)
def installed(images: NativeImages) -> None:  # noqa: F811
    """The functions of library_calls; every step has Pillow's results at the start."""
    library_calls.install()
    assert images.tested_steps == frozenset(TESTED_STEPS)


def both(use: Callable[[Any], Any], data: bytes, mode: str = "RGB") -> tuple[Any, Any]:
    """Return what ``use`` makes of a native image and of Pillow's, with what else they show."""
    found = []
    for open_image in (opened, by_pillow):
        try:
            result = use(open_image(data).convert(mode))
        except Exception as error:
            found.append((type(error), str(error)))
            continue
        if isinstance(result, Image.Image):
            found.append((result.mode, result.size, result.info, result.tobytes()))
        else:
            found.append(result)
    return found[0], found[1]


def sample(size: tuple[int, int], seed: int = 0) -> bytes:
    return jpeg_of(photograph(*size, seed), quality=95, subsampling=0, dpi=(72, 72), comment="one")


@pytest.mark.parametrize("has_avx2", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", ["Brightness", "Contrast", "Color", "Sharpness"])
def test_enhancements_have_pillows_bytes(
    name: str, mode: str, size: tuple[int, int], has_avx2: bool
) -> None:
    data = sample(size)
    _C.set_avx2_for_test(has_avx2)
    try:
        for factor in FACTORS:
            ours, theirs = both(
                lambda one, factor=factor: getattr(ImageEnhance, name)(one).enhance(factor),
                data,
                mode,
            )
            assert ours == theirs, factor
    finally:
        _C.set_avx2_for_test(True)


@pytest.mark.parametrize("factor", ["1", None, [1.0], torch.tensor(0.5), math.nan])
def test_unusual_factors_have_pillows_outcome(factor: Any) -> None:
    data = sample((9, 8))
    ours, theirs = both(lambda one: ImageEnhance.Brightness(one).enhance(factor).size, data)
    assert ours == theirs


@pytest.mark.parametrize("has_avx2", [False, True])
def test_all_hues_have_pillows_bytes(has_avx2: bool) -> None:
    """A file with all 4,096 colours of four bits each, in blocks that JPEG keeps apart."""
    values = np.arange(4096)
    colours = np.stack([values >> 8, values >> 4 & 15, values & 15], -1).astype(np.uint8) * 17
    pixels = colours.reshape(64, 64, 3).repeat(8, 0).repeat(8, 1)
    data = jpeg_of(Image.fromarray(pixels), quality=100, subsampling=0)
    _C.set_avx2_for_test(has_avx2)
    try:
        for factor in (0, 0.0, 0.001, 0.5, -0.5, 0.1, -0.1, 0.2501, -0.37):
            ours, theirs = both(lambda one, factor=factor: functional.adjust_hue(one, factor), data)
            assert ours == theirs, factor
    finally:
        _C.set_avx2_for_test(True)


def test_hues_out_of_range_raise_torchvisions_exception() -> None:
    data = sample((9, 8))
    for adjust_hue in (functional.adjust_hue, v2.functional.adjust_hue):
        for factor in (0.6, -0.51):
            ours, theirs = both(lambda one, a=adjust_hue, f=factor: a(one, f), data)
            assert ours == theirs and ours[0] is ValueError


def test_function_that_shifts_hues_otherwise_is_left_alone() -> None:
    """Older versions of torchvision may convert the factor in another way."""

    def otherwise(img: Any, hue_factor: float) -> Any:
        return functional.adjust_hue(img, -hue_factor)

    data = sample((20, 12))
    image = opened(data).convert("RGB")
    assert type(library_calls.make_adjust_hue(functional.adjust_hue)(image, 0.2)) is LazyImage
    made = library_calls.make_adjust_hue(otherwise)(image, 0.2)
    expected = functional.adjust_hue(by_pillow(data).convert("RGB"), -0.2)
    assert made.tobytes() == expected.tobytes()


def random_step(draw: random.Random, image: Any) -> tuple[str, Callable[[Any], Any]]:
    """Return a step for an image, with its name."""
    width, height = image.size
    factor = draw.choice([0.0, 1.0, draw.uniform(0, 2), draw.uniform(-3, 5)])
    hue = draw.uniform(-0.5, 0.5)
    left, top = draw.randrange(width), draw.randrange(height)
    right, bottom = draw.randint(left + 1, width), draw.randint(top + 1, height)
    part = (left, top + draw.random() / 3, right, bottom - draw.random() / 3)
    beyond = (left - 9, top, right, bottom + draw.randint(0, 20))
    border = tuple(draw.randint(0, 9) for _ in range(4))
    fill = tuple(draw.randrange(256) for _ in range(len(image.getbands())))
    size = (draw.randint(1, 90), draw.randint(1, 90))
    resample = draw.randrange(6)
    flip = draw.choice(list(Transpose)[:2])
    table = [draw.randrange(256) for _ in range(256)] * len(image.getbands())
    version = draw.choice([functional, v2.functional])
    return draw.choice(
        [
            (f"brightness {factor}", lambda one: version.adjust_brightness(one, factor)),
            (f"contrast {factor}", lambda one: version.adjust_contrast(one, factor)),
            (f"saturation {factor}", lambda one: version.adjust_saturation(one, factor)),
            (f"hue {hue}", lambda one: version.adjust_hue(one, hue)),
            ("gray", lambda one: version.rgb_to_grayscale(one, 3)),
            ("L", lambda one: one.convert("L")),
            ("RGB", lambda one: one.convert("RGB")),
            ("table", lambda one: one.point(table)),
            ("function", lambda one: one.point(lambda value: 255 - value)),
            ("solarize", lambda one: version.solarize(one, 100)),
            ("posterize", lambda one: version.posterize(one, 3)),
            ("equalize", lambda one: version.equalize(one)),
            (f"crop {left, top, right, bottom}", lambda one: one.crop((left, top, right, bottom))),
            (f"crop {beyond}", lambda one: one.crop(beyond)),
            (f"expand {border} {fill}", lambda one: ImageOps.expand(one, border, fill)),
            (f"pad {border}", lambda one: version.pad(one, list(border))),
            (f"resize {size} {resample}", lambda one: one.resize(size, resample)),
            (f"part {part} {size} {resample}", lambda one: one.resize(size, resample, part)),
            (f"flip {flip}", lambda one: one.transpose(flip)),
        ]
    )


@pytest.mark.parametrize("part", range(6))
def test_random_chains_have_pillows_pixels(images: NativeImages, part: int) -> None:  # noqa: F811
    draw = random.Random(part)
    for number in range(60):
        data = sample((draw.randint(1, 130), draw.randint(1, 130)), number)
        ours, theirs = opened(data).convert("RGB"), by_pillow(data).convert("RGB")
        names = []
        for _ in range(draw.randint(1, 7)):
            name, step = random_step(draw, theirs)
            names.append(name)
            ours, theirs = step(ours), step(theirs)
            shown = (ours.mode, ours.size, ours.info)
            assert shown == (theirs.mode, theirs.size, theirs.info), names
        assert ours.tobytes() == theirs.tobytes(), names
        assert torch.equal(functional.to_tensor(ours), functional.to_tensor(theirs)), names
    assert images.comparisons.made >= 60


JITTER = (0.4, 0.4, 0.4, 0.1)
CHAINS: dict[str, Any] = {
    "SimCLR": [
        transforms.RandomResizedCrop(48),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(*JITTER),
        transforms.RandomGrayscale(0.3),
    ],
    "SimCLR, v2": [
        v2.RandomResizedCrop(48),
        v2.ColorJitter(*JITTER),
        v2.RandomGrayscale(0.3),
        v2.RandomHorizontalFlip(),
    ],
    "strong": [transforms.ColorJitter((0, 5), (0, 5), (0, 5), 0.5), transforms.Resize((40, 30))],
    "padded": [transforms.Resize(40), transforms.RandomCrop(40, padding=4, fill=(9, 8, 7))],
    "padded, v2": [v2.Resize(40), v2.Pad([3, 5], fill=3), v2.RandomCrop(40), v2.RandomSolarize(90)],
    "tables": [
        transforms.RandomResizedCrop(40),
        transforms.RandomSolarize(100, 0.5),
        transforms.RandomPosterize(3, 0.5),
        transforms.RandomInvert(0.5),
        transforms.Lambda(lambda one: functional.adjust_gamma(one, 0.8)),
    ],
    "two sizes": [transforms.Resize(90), transforms.RandomCrop(60), transforms.Resize(33)],
    "a crop beyond": [transforms.CenterCrop((150, 200)), v2.ColorJitter(*JITTER)],
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_transforms_are_native_and_have_pillows_pixels(
    images: NativeImages,  # noqa: F811
    name: str,
) -> None:
    chain = transforms.Compose(CHAINS[name])
    for seed in range(30):
        data = sample((110 + 3 * seed, 160 - seed), seed)
        results = []
        for open_image in (opened, by_pillow):
            random.seed(seed)
            torch.manual_seed(seed)
            results.append(chain(open_image(data).convert("RGB")))
        ours, theirs = results
        assert type(ours) is LazyImage  # Pillow made none of its pixels
        assert images.comparisons.made == seed
        assert torch.equal(functional.to_tensor(ours), functional.to_tensor(theirs))


def test_orders_of_the_jitter_have_pillows_pixels() -> None:
    jitter = transforms.ColorJitter(*JITTER)
    orders = set()
    data = sample((50, 40))
    for seed in range(120):
        torch.manual_seed(seed)
        orders.add(tuple(jitter.get_params(None, None, None, None)[0].tolist()))
        made = []
        for open_image in (opened, by_pillow):
            torch.manual_seed(seed)
            made.append(jitter(open_image(data).convert("RGB")).tobytes())
        assert made[0] == made[1], seed
    assert len(orders) == 24


def test_image_is_usable_before_and_after_its_steps() -> None:
    def use(image: Any) -> Any:
        enhancer = ImageEnhance.Contrast(image)
        first = enhancer.enhance(1.5)
        copied = copy.copy(first)
        image.putpixel((1, 1), (1, 2, 3))  # after the enhancer has looked at it
        second = enhancer.enhance(0.5)
        first.putpixel((0, 0), (9, 9, 9))
        gray = functional.to_grayscale(copied, 3)
        parts = [image, first, second, copied, enhancer.degenerate, enhancer.image, gray]
        return [(one.mode, one.info, one.tobytes()) for one in parts]

    ours, theirs = both(use, sample((20, 12)))
    assert ours == theirs


def test_blends_by_the_program_have_pillows_bytes() -> None:
    def use(image: Any) -> Any:
        bright = ImageEnhance.Brightness(image).enhance(1.3)
        mixed = Image.blend(image, bright, 0.3)
        gray = Image.blend(image.convert("L").convert("RGB"), image, 1.6)
        merged = Image.merge("RGB", [image.convert("L")] * 3)
        stacked = Image.composite(image, bright, image.convert("L"))
        return [one.tobytes() for one in (mixed, gray, merged, stacked)]

    ours, theirs = both(use, sample((20, 12)))
    assert ours == theirs


def test_enhancers_of_the_program_are_its_own() -> None:
    class Twice(ImageEnhance.Brightness):
        def enhance(self, factor: float) -> Any:
            return super().enhance(2 * factor)

    class Inverted(ImageEnhance._Enhance):
        def __init__(self, image: Any) -> None:
            self.image, self.degenerate = image, ImageOps.invert(image)

    def use(image: Any) -> Any:
        mixed = ImageEnhance.Color(image)
        mixed.degenerate = ImageEnhance.Brightness(image).enhance(0.2)
        made = (Twice(image).enhance(0.7), Inverted(image).enhance(0.7), mixed.enhance(0.4))
        return [one.tobytes() for one in made]

    ours, theirs = both(use, sample((20, 12)))
    assert ours == theirs


def test_points_have_pillows_outcome() -> None:
    luts: tuple[Any, ...] = (
        list(range(256)) * 3,
        [255 - value for value in range(256)] * 3,
        [value * 1.7 for value in range(256)] * 3,
        [value - 100 for value in range(256)] * 3,
        list(range(256)),
        [0] * 7,
        lambda value: value * 2,
        lambda value: 1 / 0,
        tuple(range(256)) * 3,
        np.arange(768) // 3,
        "text",
    )
    for lut in luts:
        for mode in ("RGB", "L"):
            ours, theirs = both(lambda one, lut=lut: one.point(lut), sample((20, 12)), mode)
            assert ours == theirs, lut
    calls: list[int] = []
    opened(sample((9, 9))).convert("RGB").point(lambda value: calls.append(value) or 300)
    assert calls == list(range(256))


def test_borders_have_pillows_outcome() -> None:
    for border in (0, 3, (1, 2), (1, 2, 3, 4), (1,), (-1, 2), -2, 2.5, (1, 2, 3), "2", [1, 2]):
        for fill in (0, 200, 70_000, (1, 2, 3), (1, 2), "red", "nothing", None, 2.5):
            for mode in ("RGB", "L"):
                ours, theirs = both(
                    lambda one, b=border, f=fill: ImageOps.expand(one, b, f), sample((9, 7)), mode
                )
                assert ours == theirs, (border, fill, mode)


def test_crops_beyond_the_image_have_pillows_outcome() -> None:
    boxes = (
        (-3, -4, 20, 30), (5, 5, 500, 6), (-9, -9, -2, -2), (30, 2, 40, 9), (3, 3, 3, 9),
        (0, 0, 20, 13), (4, 4, 2, 9), (-1.5, 2, 8, 9), (-100_000, 0, 100_000, 3),
    )  # fmt: skip
    for box in boxes:
        for turn in (False, True):
            ours, theirs = both(
                lambda one, b=box, t=turn: (one.transpose(0) if t else one).crop(b),
                sample((20, 12)),
            )
            assert ours == theirs, box


def test_gray_images_have_pillows_tensors(images: NativeImages) -> None:  # noqa: F811
    for chain in (
        transforms.Grayscale(),
        transforms.Grayscale(3),
        transforms.Compose([transforms.Grayscale(), transforms.Resize(20), transforms.Pad(3)]),
        transforms.Compose([v2.Grayscale(), v2.ColorJitter(0.5, 0.5)]),
    ):
        torch.manual_seed(1)
        ours = chain(opened(sample((60, 50))).convert("RGB"))
        torch.manual_seed(1)
        theirs = chain(by_pillow(sample((60, 50))).convert("RGB"))
        assert type(ours) is LazyImage and ours.mode == theirs.mode
        for convert in (functional.to_tensor, functional.pil_to_tensor, v2.functional.to_image):
            got, expected = convert(ours), convert(theirs)
            assert torch.equal(got, expected)
            assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
        restored = pickle.loads(pickle.dumps(ours))
        assert (restored.mode, restored.tobytes()) == (theirs.mode, theirs.tobytes())


def test_images_of_other_modes_are_left_to_the_originals() -> None:
    for mode in ("RGBA", "L", "P", "CMYK", "HSV"):
        for use in (
            lambda one: functional.adjust_hue(one, 0.2),
            lambda one: functional.to_grayscale(one, 3),
            lambda one: ImageEnhance.Contrast(one).enhance(0.5),
            lambda one: ImageOps.expand(one, 2),
        ):
            ours, theirs = both(use, sample((20, 12)), mode)
            assert ours == theirs


def test_first_images_with_each_step_are_compared(
    images: NativeImages,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 2)

    def compared_by(use: Callable[[Any], Any]) -> int:
        before = images.comparisons.compared
        functional.to_tensor(use(opened(sample((20, 12))).convert("RGB")))
        return images.comparisons.compared - before

    def bright(one: Any) -> Any:
        return functional.adjust_brightness(one, 1.2)

    assert [compared_by(lambda one: one) for _ in range(4)] == [1, 1, 0, 0]
    assert [compared_by(bright) for _ in range(4)] == [1, 1, 0, 0]
    assert [compared_by(lambda one: functional.adjust_hue(bright(one), 0.1)) for _ in range(3)] == [
        1, 1, 0,
    ]  # fmt: skip
    assert compared_by(lambda one: one.resize((9, 9))) == 0


def test_difference_in_a_step_gives_pillows_pixels(
    images: NativeImages,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 3)
    make = images._native_bytes
    data = sample((40, 30))
    ours = functional.adjust_hue(opened(data).convert("RGB"), 0.1)
    with monkeypatch.context() as wrong:
        wrong.setattr(images, "_native_bytes", lambda *one: bytes(len(make(*one) or b"")))
        with pytest.warns(match=r"differs from the image by Pillow .*, hue 25\)"):
            got = functional.to_tensor(ours)
    expected = functional.adjust_hue(by_pillow(data).convert("RGB"), 0.1)
    assert torch.equal(got, functional.to_tensor(expected))
    assert not images.is_used
    images.refusal = ""


def test_step_that_differs_at_the_start_is_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other compilers of Pillow may round blends in another way."""
    replay = Chain.replay

    def otherwise(chain: Chain, open_image: Any, data: bytes) -> Any:
        image = replay(chain, open_image, data)
        return image.rotate(180) if "contrast" in chain.tested_steps else image

    monkeypatch.setattr(Chain, "replay", otherwise)
    started = NativeImages.start(by_pillow_of_file)
    assert isinstance(started, NativeImages)
    assert started.tested_steps == frozenset(TESTED_STEPS) - {"contrast"}
    monkeypatch.undo()
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 0)
    monkeypatch.setattr(lazy_images, "_images", started)
    for use, kind in (
        (lambda one: ImageEnhance.Contrast(one).enhance(0.6), Image.Image),
        (lambda one: ImageEnhance.Brightness(one).enhance(0.6), LazyImage),
    ):
        ours = use(opened(sample((20, 12))).convert("RGB"))
        assert type(ours) is kind
        assert ours.tobytes() == use(by_pillow(sample((20, 12))).convert("RGB")).tobytes()


def by_pillow_of_file(file: io.BytesIO) -> Any:
    return by_pillow(file.getvalue())


def test_uninstalled_functions_are_the_originals() -> None:
    from torchvision.transforms import _functional_pil
    from torchvision.transforms.v2.functional import _utils

    owners = (
        (ImageEnhance.Brightness, "__init__"),
        (ImageEnhance.Contrast, "__init__"),
        (ImageEnhance._Enhance, "enhance"),
        (ImageOps, "expand"),
        (_functional_pil, "adjust_hue"),
        (_functional_pil, "to_grayscale"),
    )
    replaced = [getattr(owner, name) for owner, name in owners]
    library_calls.install()
    assert [getattr(owner, name) for owner, name in owners] == replaced  # not a second time
    assert LazyImage in _utils._KERNEL_REGISTRY[v2.functional.adjust_hue]
    image = opened(sample((20, 12))).convert("RGB")
    bright = ImageEnhance.Brightness(image).enhance(0.5)
    lazy_images.uninstall()
    originals = [getattr(owner, name) for owner, name in owners]
    assert all(one.__wrapped__ is old for one, old in zip(replaced, originals, strict=True))
    assert LazyImage not in _utils._KERNEL_REGISTRY[v2.functional.adjust_hue]
    expected = ImageEnhance.Brightness(by_pillow(sample((20, 12))).convert("RGB")).enhance(0.5)
    assert bright.tobytes() == expected.tobytes()


def test_chain_with_steps_is_printed_for_people() -> None:
    chain = Chain.of_image(50, 40).resized(20, 10, 2)
    assert chain is not None
    jittered = chain.followed("contrast", 1.23456).followed("hue", 250).converted("L")
    assert str(jittered.flipped(True, False)) == (
        "window (0, 0, 50, 40), resize to 20x10 by filter 2, crop (0, 0, 20, 10), "
        "contrast 1.235, hue 250, gray, flip columns"
    )


@pytest.mark.parametrize("name", ["SimCLR", "SimCLR, v2", "tables"])
def test_stream_of_workers_is_torchs_and_native(folder: Path, name: str) -> None:  # noqa: F811
    class Counting(datasets.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return functional.to_tensor(image), label, type(image) is LazyImage

    lazy_images.uninstall()  # in this process, of which the workers are copies
    dataset = Counting(str(folder), transforms.Compose(CHAINS[name]))
    streams = []
    for make in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(3)
        loader: Any = make(dataset, batch_size=8, shuffle=True, num_workers=2)
        streams.append(list(loader))
    assert len(streams[0]) == len(streams[1]) == 6
    for theirs, ours in zip(*streams, strict=True):
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])
        assert not theirs[2].any()
    is_native = sum(int(batch[2].sum()) for batch in streams[1])
    assert is_native == sum(path.endswith("jpg") for path, _ in dataset.samples)


def test_filters_of_later_resizes_have_pillows_bytes() -> None:
    for filter_ in (*range(1, 6), Resampling.NEAREST):
        ours, theirs = both(
            lambda one, f=filter_: one.resize((33, 41), f).transpose(0).resize((50, 20), f),
            sample((64, 48)),
        )
        assert ours == theirs, filter_


@pytest.mark.parametrize("has_avx2", [False, True])
@pytest.mark.parametrize("resample", range(6))
def test_resizes_of_parts_have_pillows_bytes(
    images: NativeImages,  # noqa: F811
    resample: int,
    has_avx2: bool,
) -> None:
    draw = random.Random(resample)
    _C.set_avx2_for_test(has_avx2)
    try:
        for number in range(60):
            width, height = draw.randint(1, 200), draw.randint(1, 200)
            data = sample((width, height), number)
            left, right = sorted(draw.uniform(0, width) for _ in range(2))
            top, bottom = sorted(draw.uniform(0, height) for _ in range(2))
            if number % 3 == 0:
                left, top, right, bottom = int(left), int(top), int(right) + 1, int(bottom) + 1
            if number % 7 == 0:
                left, right = 0, width
            size = (draw.randint(1, 150), draw.randint(1, 150))
            if number % 11 == 0:
                size = (right - left, bottom - top)
            if number % 2:  # after a crop, and a flip
                crop = (
                    draw.randint(0, int(left)),
                    0,
                    width,
                    draw.randint(math.ceil(bottom), height),
                )
                box = (left - crop[0], top, right - crop[0], bottom)
            else:
                crop, box = (0, 0, width, height), (left, top, right, bottom)
            for turn in (False, True):
                ours, theirs = both(
                    lambda one, c=crop, t=turn, s=size, b=box: (
                        one.crop(c).transpose(1) if t else one.crop(c)
                    ).resize(s, resample, b),
                    data,
                )
                assert ours == theirs, (width, height, crop, size, box)
    finally:
        _C.set_avx2_for_test(True)
    assert images.comparisons.made == 120


def test_unusual_parts_have_pillows_outcome() -> None:
    boxes: tuple[Any, ...] = (
        (0, 0, 20, 12), (0, 0, 21, 12), (-1, 0, 20, 12), (3, 3, 3, 9), (9, 3, 3, 9), [1, 1, 9, 9],
        (1, 1, 9), (0.0, 0.0, 20.0, 12.0), (1e-9, 0, 20, 12), (0, 0, math.inf, 12),
        (0, 0, math.nan, 12), ("0", 0, 20, 12), (np.float32(1.5), 1, np.float64(9.25), 7),
        (4, 4, 4.001, 4.001), 5, (0, 0, 20, 12.0000001),
    )  # fmt: skip
    for box in boxes:
        for size in ((20, 12), (8, 6), (0, 4), (40, 40)):
            for gap in (None, 2.0):
                ours, theirs = both(
                    lambda one, s=size, b=box, g=gap: one.resize(s, 2, b, reducing_gap=g),
                    sample((20, 12)),
                )
                assert ours == theirs, (box, size)


def test_fit_is_native(images: NativeImages) -> None:  # noqa: F811
    data = sample((120, 90))
    ours = ImageOps.fit(opened(data).convert("RGB"), (40, 40), centering=(0.3, 0.7))
    theirs = ImageOps.fit(by_pillow(data).convert("RGB"), (40, 40), centering=(0.3, 0.7))
    assert type(ours) is LazyImage
    assert ours.tobytes() == theirs.tobytes()
