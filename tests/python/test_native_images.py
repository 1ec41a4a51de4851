# SPDX-License-Identifier: Apache-2.0
"""Images that are made natively have Pillow's pixels, and everything else about them is Pillow's.

The oracle is Pillow itself, and torch's DataLoader over the same program.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import random
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageFilter, ImageOps, JpegImagePlugin
from PIL.Image import Resampling, Transpose
from pool_datasets import CODE
from pool_processes import PoolProcesses
from torchvision import datasets, transforms
from torchvision.transforms import functional, v2

from penstock import _C, DataLoader, Pool
from penstock.images import lazy_images, native_images
from penstock.images.chains import Chain
from penstock.images.lazy_images import LazyImage
from penstock.images.native_images import Comparisons, NativeImages

ENCODINGS: tuple[dict[str, Any], ...] = (
    {"quality": 90, "subsampling": 0},
    {"quality": 75, "subsampling": 1},
    {"quality": 95, "subsampling": 2},
    {"quality": 40, "progressive": True},
    {"quality": 85, "optimize": True, "restart_marker_rows": 1},
)


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image with edges, gradients and noise."""
    draw = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    colours = [
        np.sin(x * draw.uniform(0, 0.2) + y * draw.uniform(0, 0.2)) * 60
        + ((x * draw.normal() + y * draw.normal()) > 0) * 80
        + draw.normal(110, 12, x.shape)
        for _ in range(3)
    ]
    return Image.fromarray(np.stack(colours, -1).clip(0, 255).astype(np.uint8))


def jpeg_of(image: Image.Image, **encoding: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **encoding)
    return file.getvalue()


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeImages]:
    """Native images in this process, which are not compared by themselves."""
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 0)
    assert lazy_images.install() == ""
    lazy_images.install_to_tensor()
    started = lazy_images.start()
    assert isinstance(started, NativeImages), started
    yield started
    assert started.is_used
    lazy_images.uninstall()


def by_pillow(data: bytes) -> Any:
    return JpegImagePlugin.jpeg_factory(io.BytesIO(data))


def opened(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


def random_call(draw: random.Random, size: tuple[int, int]) -> tuple[str, tuple[Any, ...]]:
    """Return a method of Pillow's images, and arguments for an image of this size."""
    width, height = size
    kind = draw.choice(["crop", "crop", "resize", "resize", "transpose", "copy", "convert"])
    if kind == "crop":
        left, top = draw.randrange(width), draw.randrange(height)
        right, bottom = draw.randint(left + 1, width), draw.randint(top + 1, height)
        if draw.random() < 0.1:
            right += 5  # beyond the image, where Pillow adds black
        return kind, ((left, top, right, bottom),)
    if kind == "resize":
        wanted = (draw.randint(1, 150), draw.randint(1, 150))
        return kind, (wanted, draw.choice([None, *range(6)]))
    if kind == "transpose":
        return kind, (draw.choice(list(Transpose)),)
    return kind, ("RGB",) if kind == "convert" else ()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_chains_of_calls_have_pillows_pixels(
    images: NativeImages, encoding: dict[str, Any], mode: str
) -> None:
    draw = random.Random(f"{encoding} {mode}")
    for number in range(40):
        width, height = draw.randint(1, 300), draw.randint(1, 300)
        data = jpeg_of(photograph(width, height, number).convert(mode), **encoding)
        ours, theirs = opened(data).convert("RGB"), by_pillow(data).convert("RGB")
        calls = []
        for _ in range(draw.randint(0, 5)):
            name, arguments = random_call(draw, theirs.size)
            calls.append((name, arguments))
            ours, theirs = getattr(ours, name)(*arguments), getattr(theirs, name)(*arguments)
            assert (ours.size, ours.mode) == (theirs.size, theirs.mode)
        assert ours.tobytes() == theirs.tobytes(), (width, height, calls)
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert images.comparisons.made >= 40


@pytest.mark.parametrize("has_avx2", [False, True])
@pytest.mark.parametrize("resample", [1, 2, 3, 4, 5])
def test_resizes_have_pillows_bytes(images: NativeImages, resample: int, has_avx2: bool) -> None:
    draw = random.Random(resample)
    _C.set_avx2_for_test(has_avx2)
    try:
        for number in range(40):
            width, height = draw.randint(1, 200), draw.randint(1, 200)
            data = jpeg_of(photograph(width, height, number), quality=100, subsampling=0)
            wanted = draw.randint(1, 250), draw.randint(1, 250)
            ours = opened(data).resize(wanted, resample)
            theirs = by_pillow(data).resize(wanted, resample)
            assert ours.tobytes() == theirs.tobytes(), (width, height, wanted)
    finally:
        _C.set_avx2_for_test(True)
    assert images.comparisons.made == 40


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (16, 16), (224, 224), (225, 223)])
def test_to_tensor_has_torchvisions_numbers(images: NativeImages, size: tuple[int, int]) -> None:
    data = jpeg_of(photograph(310, 240), quality=92)
    for is_flipped in (False, True):
        ours, theirs = opened(data).resize(size), by_pillow(data).resize(size)
        if is_flipped:
            ours, theirs = ours.transpose(0), theirs.transpose(0)
        assert type(ours) is LazyImage
        got, expected = functional.to_tensor(ours), functional.to_tensor(theirs)
        assert torch.equal(got, expected)
        assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
        assert type(ours) is LazyImage  # nothing was kept


def test_other_methods_work_on_the_pixels(images: NativeImages) -> None:
    data = jpeg_of(photograph(90, 70), quality=92)

    def both(use: Any) -> tuple[Any, Any]:
        return use(opened(data).convert("RGB")), use(by_pillow(data).convert("RGB"))

    for use in (
        lambda one: one.rotate(30).tobytes(),
        lambda one: one.getpixel((5, 6)),
        lambda one: one.filter(ImageFilter.GaussianBlur(2)).tobytes(),
        lambda one: [band.tobytes() for band in one.split()],
        lambda one: one.convert("L").tobytes(),
        lambda one: one.resize((20, 20), Resampling.NEAREST).tobytes(),
        lambda one: one.resize((20, 20), Resampling.BILINEAR, (3.5, 2, 60, 50)).tobytes(),
        lambda one: one.resize((20, 20), reducing_gap=2.0).tobytes(),
        lambda one: ImageOps.autocontrast(one).tobytes(),
        lambda one: one.histogram(),
        lambda one: one.getbbox(),
        lambda one: one.crop().tobytes(),
        lambda one: one.info,
    ):
        ours, theirs = both(use)
        assert ours == theirs


def test_image_that_the_program_changes_is_its_own(images: NativeImages) -> None:
    data = jpeg_of(photograph(30, 20), quality=92)
    first = opened(data).convert("RGB")
    second, third = first.copy(), copy.deepcopy(first)
    first.putpixel((1, 2), (9, 8, 7))
    assert first.getpixel((1, 2)) == (9, 8, 7)
    assert second.getpixel((1, 2)) == third.getpixel((1, 2)) != (9, 8, 7)
    assert first.crop((1, 2, 2, 3)).getpixel((0, 0)) == (9, 8, 7)


def test_opened_file_stays_usable(images: NativeImages, tmp_path: Path) -> None:
    path = tmp_path / "one.jpg"
    path.write_bytes(jpeg_of(photograph(30, 20), quality=92))
    with open(path, "rb") as file:
        image = Image.open(file)
        converted = image.convert("RGB")
    assert isinstance(image, JpegImagePlugin.JpegImageFile) and image.format == "JPEG"
    assert image.tobytes() == converted.tobytes() == Image.open(path).tobytes()
    with Image.open(path) as again:
        cropped = again.crop((1, 1, 5, 5))
    assert cropped.tobytes() == converted.crop((1, 1, 5, 5)).tobytes()
    with Image.open(path) as drafted:
        drafted.draft("L", (10, 10))
        small = drafted.convert("RGB")
    theirs = by_pillow(path.read_bytes())
    theirs.draft("L", (10, 10))
    assert small.tobytes() == theirs.convert("RGB").tobytes()


def test_verified_and_closed_files_raise_as_by_pillow(images: NativeImages, tmp_path: Path) -> None:
    path = tmp_path / "one.jpg"
    path.write_bytes(jpeg_of(photograph(30, 20), quality=92))

    def outcome(open_image: Any, spoil: str) -> Any:
        with open(path, "rb") as file:
            image = open_image(file)
            if spoil == "verify":
                image.verify()
        if spoil == "close":
            image.close()
        try:
            return image.convert("RGB").tobytes()
        except Exception as error:
            return type(error), str(error)

    for spoil in ("verify", "close", "file"):
        assert outcome(Image.open, spoil) == outcome(JpegImagePlugin.jpeg_factory, spoil)


def test_pickled_image_is_a_plain_one(images: NativeImages) -> None:
    image = opened(jpeg_of(photograph(30, 20), quality=92)).convert("RGB")
    restored = pickle.loads(pickle.dumps(image))
    assert type(restored) is Image.Image
    assert restored.tobytes() == image.tobytes()
    opened_file = opened(jpeg_of(photograph(30, 20), quality=92))
    restored = pickle.loads(pickle.dumps(opened_file))
    assert type(restored) is JpegImagePlugin.JpegImageFile
    assert restored.tobytes() == opened_file.tobytes()


def test_images_are_compared_by_their_pixels(images: NativeImages) -> None:
    data = jpeg_of(photograph(30, 20), quality=92)
    first, second = (opened(data).convert("RGB") for _ in range(2))
    assert first == second
    assert type(first) is type(second) is Image.Image
    assert opened(data).convert("RGB") == by_pillow(data).convert("RGB")
    assert opened(data).convert("RGB") != by_pillow(data).convert("RGB").rotate(180)


def test_truncated_file_raises_pillows_exception_at_the_same_call(images: NativeImages) -> None:
    data = jpeg_of(photograph(120, 90), quality=90)
    for end in range(0, len(data), len(data) // 60):
        part = data[:end]
        outcomes = []
        for open_image in (opened, lambda one: Image.open(io.BytesIO(one), formats=["JPEG"])):
            try:
                outcomes.append(open_image(part).convert("RGB").tobytes())
            except Exception as error:
                outcomes.append((type(error), str(error).partition("<")[0]))
        try:
            expected: Any = by_pillow(part).convert("RGB").tobytes()
        except SyntaxError:
            assert not isinstance(outcomes[0], bytes)
            continue
        except Exception as error:
            expected = (type(error), str(error).partition("<")[0])
        assert outcomes[0] == expected, end


def test_damaged_files_give_pillows_outcome(images: NativeImages) -> None:
    data, draw = jpeg_of(photograph(120, 90), quality=90), random.Random(0)
    for _ in range(300):
        part = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            part[draw.randrange(len(part))] = draw.randrange(256)
        outcomes = []
        for open_image in (opened, by_pillow):
            try:
                image = open_image(bytes(part)).convert("RGB")
                width, height = image.size
                box = (width // 4, height // 4, width // 2 + 1, height // 2 + 1)
                outcomes.append(image.crop(box).tobytes())
            except Exception as error:
                outcomes.append(error)
        ours, theirs = outcomes
        if isinstance(theirs, bytes):
            assert ours == theirs
        else:
            assert isinstance(ours, Exception)


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_unusual_modes_are_pillows(images: NativeImages, mode: str) -> None:
    data = jpeg_of(photograph(40, 30).convert(mode), quality=92)
    assert opened(data).mode == mode
    assert opened(data).tobytes() == by_pillow(data).tobytes()
    ours, theirs = opened(data).convert("RGB"), by_pillow(data).convert("RGB")
    assert ours.resize((9, 9)).tobytes() == theirs.resize((9, 9)).tobytes()


def test_orientation_is_applied_as_by_pillow(images: NativeImages) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = jpeg_of(photograph(40, 30), quality=92, exif=exif)
        ours, theirs = (ImageOps.exif_transpose(one(data)) for one in (opened, by_pillow))
        assert (ours.size, ours.tobytes()) == (theirs.size, theirs.tobytes())


def test_first_difference_ends_the_use_and_gives_pillows_pixels(
    images: NativeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 3)
    data = jpeg_of(photograph(40, 30), quality=92)
    make = images._native_bytes
    with monkeypatch.context() as wrong:
        wrong.setattr(images, "_native_bytes", lambda *one: bytes(len(make(*one) or b"")))
        with pytest.warns(match=r"differs from the image by Pillow .*window \(0, 0, 40, 30\)"):
            pixels = opened(data).convert("RGB").tobytes()
    assert pixels == by_pillow(data).convert("RGB").tobytes()
    assert not images.is_used
    assert type(opened(data).convert("RGB")) is Image.Image
    images.refusal = ""


def test_untested_versions_are_compared_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_images, "COMPARED_FIRST_OF_OTHERS", 20)
    monkeypatch.setattr(native_images, "COMPARED_EVERY", 50)
    for version, expected in (
        ("13.1.0", [*range(1, 9), 50, 100]),
        ("99.0", [*range(1, 21), 50, 100]),
    ):
        comparisons = Comparisons(version, native_images.TESTED_PILLOW)
        whole = Chain.of_image(9, 9).tested_steps
        found = []
        for number in range(1, 101):
            is_due = comparisons.is_next_due(whole)
            assert comparisons.count(whole) == is_due
            found += [number] * is_due
        assert found == expected
        assert (comparisons.made, comparisons.compared) == (100, len(expected))


def test_pillow_that_resizes_otherwise_is_not_imitated() -> None:
    class Other:
        def __init__(self, file: Any) -> None:
            self.image = JpegImagePlugin.jpeg_factory(file)

        def convert(self, mode: str) -> Image.Image:
            return self.image.convert(mode).rotate(180)

    assert "differ" in str(NativeImages.start(Other))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIPELINES: dict[str, Any] = {
    "training": [
        transforms.RandomResizedCrop(64),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ],
    "evaluation": [
        transforms.Resize(72),
        transforms.CenterCrop(64),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ],
    "v2": [
        v2.RandomResizedCrop(64, interpolation=v2.InterpolationMode.BICUBIC),
        v2.RandomHorizontalFlip(0.3),
        v2.RandomVerticalFlip(0.3),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ],
    "colours": [
        transforms.RandomResizedCrop(64),
        transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
        transforms.RandomGrayscale(0.5),
        transforms.RandomRotation(20),
        transforms.PILToTensor(),
    ],
    "random_crop": [
        transforms.RandomCrop(64, padding=4, pad_if_needed=True),
        transforms.ToTensor(),
    ],
    "lambda": [transforms.Lambda(lambda one: one.resize((50, 40))), np.asarray, torch.as_tensor],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw = random.Random(1)
    for number in range(48):
        kind = root / f"class{number % 3}"
        kind.mkdir(exist_ok=True)
        image = photograph(draw.randint(70, 260), draw.randint(70, 260), number)
        path = kind / f"{number:03}.{'bmp' if number % 11 == 0 else 'jpg'}"
        if path.suffix == ".bmp":
            image.save(path)
        else:
            path.write_bytes(jpeg_of(image, **ENCODINGS[number % len(ENCODINGS)]))
    return root


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("fetch_threads", [1, 3])
def test_stream_of_an_image_folder_is_torchs(folder: Path, name: str, fetch_threads: int) -> None:
    if fetch_threads > 1 and name not in ("evaluation", "lambda"):
        pytest.skip("threads draw in no fixed order")
    dataset = datasets.ImageFolder(str(folder), transforms.Compose(PIPELINES[name]))
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": 2}
    streams = []
    for make, more in (
        (torch.utils.data.DataLoader, {}),
        (DataLoader, {"fetch_threads": fetch_threads}),
    ):
        torch.manual_seed(3)
        loader: Any = make(dataset, **options, **more)
        streams.append([batch for _ in range(2) for batch in loader])
    assert len(streams[0]) == len(streams[1]) == 12
    for theirs, ours in zip(*streams, strict=True):
        for expected, got in zip(theirs, ours, strict=True):
            assert expected.dtype == got.dtype and torch.equal(expected, got)


def watched_images(folder: Path) -> Any:
    """Return a dataset whose samples begin with the number of images that they made natively."""

    def made_count() -> int:
        images = lazy_images._images
        return images.comparisons.made if isinstance(images, NativeImages) else 0

    class Watched(datasets.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            before = made_count()
            image, _ = super().__getitem__(index)
            return made_count() - before, image.sum()

    return Watched(str(folder), transforms.Compose(PIPELINES["training"]))


def test_workers_make_images_natively(folder: Path) -> None:
    dataset = watched_images(folder)
    made = torch.cat([batch[0] for batch in DataLoader(dataset, batch_size=8, num_workers=2)])
    assert made.tolist() == [0 if path.endswith("bmp") else 1 for path, _ in dataset.samples]


class Files(torch.utils.data.Dataset[Any]):
    """Images of files; with each, whether the native images have started before and after it."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        before = lazy_images._images is not None
        with Image.open(self.paths[index]) as image:
            pixels = functional.to_tensor(image.convert("RGB").resize((20, 30)))
        return pixels, torch.tensor([before, lazy_images._images is not None])


def test_worker_starts_the_native_images_at_its_first_jpeg_file(folder: Path) -> None:
    bmp, jpeg = (sorted(folder.glob(f"*/*.{kind}")) for kind in ("bmp", "jpg"))
    loader = DataLoader(Files(bmp), batch_size=2, num_workers=1)
    assert not torch.cat([started for _, started in loader]).any()
    loader = DataLoader(Files([*bmp, *jpeg[:3]]), batch_size=1, num_workers=1)
    started = [one[0].tolist() for _, one in loader]
    assert started == [[False, False]] * len(bmp) + [[False, True]] + [[True, True]] * 2


@pytest.mark.parametrize("setting", ["warnings", "device", "default_dtype"])
def test_settings_of_the_program_do_not_reach_the_start(folder: Path, setting: str) -> None:
    paths = sorted(folder.glob("*/*.jpg"))[:9]

    class Sums(Files):
        def __getitem__(self, index: int) -> Any:
            pixels, _ = super().__getitem__(index)
            assert isinstance(lazy_images._images, NativeImages)
            return pixels.numpy(), lazy_images._images.comparisons.made

    def set_up(_: int) -> None:
        if setting == "warnings":
            warnings.simplefilter("error")
        elif setting == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)

    def collate(samples: list[Any]) -> Any:
        return [made for made, _ in samples], [count for _, count in samples]

    loader = DataLoader(
        Sums(paths), batch_size=3, num_workers=1, worker_init_fn=set_up, collate_fn=collate
    )
    batches = list(loader)
    assert sum((counts for _, counts in batches), []) == list(range(1, 10))
    if setting == "default_dtype":
        torch.set_default_dtype(torch.float64)
    try:
        for path, got in zip(paths, sum((made for made, _ in batches), []), strict=True):
            theirs = functional.to_tensor(
                by_pillow(path.read_bytes()).convert("RGB").resize((20, 30))
            )
            assert got.dtype == theirs.numpy().dtype and np.array_equal(got, theirs.numpy())
    finally:
        torch.set_default_dtype(torch.float32)


def test_start_that_fails_leaves_the_program_to_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Any) -> Any:
        starts.append(1)
        raise RuntimeError("as a warning that is an error")

    starts: list[int] = []
    monkeypatch.setattr(NativeImages, "start", staticmethod(fail))
    data = jpeg_of(photograph(30, 20), quality=92)
    assert lazy_images.install() == ""
    try:
        for _ in range(2):
            image = opened(data)
            assert type(image) is JpegImagePlugin.JpegImageFile
            assert image.tobytes() == by_pillow(data).tobytes()
        assert lazy_images.start() == "RuntimeError: as a warning that is an error"
        assert len(starts) == 1
    finally:
        lazy_images.uninstall()
    assert Image.OPEN["JPEG"][0] is JpegImagePlugin.jpeg_factory


def test_threads_start_the_native_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start, starts = NativeImages.start, []
    both = threading.Barrier(4)

    def counted(open_image: Any) -> Any:
        starts.append(1)
        return start(open_image)

    def use(seed: int) -> bool:
        data = jpeg_of(photograph(30, 20, seed), quality=92)
        both.wait()
        image = opened(data)
        return image.convert("RGB").tobytes() == by_pillow(data).tobytes()

    monkeypatch.setattr(NativeImages, "start", staticmethod(counted))
    assert lazy_images.install() == ""
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(use, range(4)))
        assert len(starts) == 1
    finally:
        lazy_images.uninstall()


def test_lazy_image_outlives_the_native_images(images: NativeImages) -> None:
    data = jpeg_of(photograph(30, 20), quality=92)
    file, image = opened(data), opened(data).convert("RGB")
    assert type(image) is LazyImage
    lazy_images.uninstall()
    expected = by_pillow(data).tobytes()
    assert image.crop((0, 0, 30, 20)).tobytes() == image.tobytes() == expected
    assert file.convert("RGB").tobytes() == expected


def test_opener_of_the_program_is_kept() -> None:
    def opener(file: Any, filename: Any = None) -> Any:
        return before(file, filename)

    data = jpeg_of(photograph(30, 20), quality=92)
    assert lazy_images.install() == ""
    before, accept = Image.OPEN["JPEG"]
    try:
        Image.register_open("JPEG", opener, accept)
        assert "another module" in lazy_images.install()
        assert opened(data).convert("RGB").tobytes() == by_pillow(data).tobytes()
        lazy_images.uninstall()
        assert Image.OPEN["JPEG"][0] is opener
    finally:
        Image.register_open("JPEG", JpegImagePlugin.jpeg_factory, accept)
        lazy_images.uninstall()


def test_library_of_the_other_interface_is_called_by_its_own_layout() -> None:
    """Ubuntu's and conda-forge's Pillow has interface 8.0 of libjpeg-turbo, as torchvision has."""
    assert torchvision.__file__ is not None
    folder = Path(torchvision.__file__).parent.with_name("torchvision.libs")
    paths = list(folder.glob("libjpeg*.so.8"))
    if not paths:
        pytest.skip("this torchvision comes without a libjpeg of its own")
    library = _C.JpegLibrary(str(paths[0]))
    data = jpeg_of(photograph(90, 70), quality=92)
    whole = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for box in ((0, 0, 90, 70), (20, 30, 41, 22)):
        chain = Chain(box, None, (0, 0, *box[2:]))
        left, top, width, height = box
        expected = whole[:, top : top + height, left : left + width].permute(1, 2, 0)
        made = library.make_bytes(data, 0, chain, True)
        assert made == expected.contiguous().numpy().tobytes()


def test_job_of_a_pool_makes_images_natively(folder: Path, steady_pool: PoolProcesses) -> None:
    pool = Pool(steady_pool.endpoint, code_paths=[CODE])
    dataset = datasets.ImageFolder(str(folder), transforms.Compose(PIPELINES["training"]))
    streams = []
    for options in ({"num_workers": 2}, {"pool": pool}):
        torch.manual_seed(5)
        loader = DataLoader(dataset, batch_size=8, shuffle=True, seeding="batch", **options)
        streams.append(list(loader))
    for expected, got in zip(*streams, strict=True):
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
    watched = DataLoader(watched_images(folder), batch_size=8, **options)
    made = torch.cat([batch[0] for batch in watched])
    assert made.tolist() == [0 if path.endswith("bmp") else 1 for path, _ in dataset.samples]


def test_variable_switches_native_images_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(datasets.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return lazy_images._images is None

    monkeypatch.setenv("PENSTOCK_NATIVE_IMAGES", "0")
    loader = DataLoader(Watched(str(folder)), batch_size=8, num_workers=1)
    assert all(bool(batch.all()) for batch in loader)


def test_chain_is_printed_for_people() -> None:
    chain = Chain.of_image(500, 375).cropped(10, 20, 310, 220)
    assert chain is not None
    resized = chain.resized(224, 224, 2)
    assert resized is not None
    assert str(resized.flipped(True, False)) == (
        "window (10, 20, 300, 200), resize to 224x224 by filter 2, crop (0, 0, 224, 224), "
        "flip columns"
    )


def packaged_images() -> Iterator[Image.Image]:
    """Yield the photographs and test images that scikit-image, scikit-learn and Matplotlib ship."""
    for package, pattern in (
        ("skimage", "data/*.png"),
        ("skimage", "data/*.jpg"),
        ("sklearn", "datasets/images/*.jpg"),
        ("matplotlib", "mpl-data/sample_data/*.jpg"),
        ("matplotlib", "mpl-data/images/*.png"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.glob(pattern)):
            with Image.open(path) as image:
                yield image.convert("L" if image.mode in ("1", "L", "I;16", "I") else "RGB")


CORPUS_TRANSFORMS: dict[str, Any] = {
    "RandomResizedCrop": transforms.RandomResizedCrop(64),
    "RandomResizedCrop, antialias, bicubic": transforms.RandomResizedCrop(
        (50, 77), interpolation=transforms.InterpolationMode.BICUBIC
    ),
    "Resize, CenterCrop": transforms.Compose([transforms.Resize(72), transforms.CenterCrop(64)]),
    "RandomCrop": transforms.RandomCrop(60, padding=4, pad_if_needed=True),
    "FiveCrop": transforms.Compose([transforms.Resize(64), transforms.FiveCrop(40)]),
    "flips": transforms.Compose(
        [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip(), transforms.Resize(40)]
    ),
    "ColorJitter": transforms.Compose(
        [transforms.RandomResizedCrop(48), transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    ),
    "RandomGrayscale": transforms.Compose(
        [transforms.RandomResizedCrop(48), transforms.RandomGrayscale(0.5)]
    ),
    "RandomRotation": transforms.Compose([transforms.Resize(60), transforms.RandomRotation(30)]),
    "RandomPerspective": transforms.Compose(
        [transforms.Resize(60), transforms.RandomPerspective()]
    ),
    "Pad": transforms.Compose([transforms.CenterCrop(50), transforms.Pad(7)]),
    "GaussianBlur": transforms.Compose([transforms.Resize(48), transforms.GaussianBlur(5)]),
    "RandAugment": transforms.Compose([transforms.Resize(56), transforms.RandAugment()]),
    "v2.ScaleJitter": v2.ScaleJitter((80, 80)),
}


LONG_PARTS = [pytest.param(part, marks=pytest.mark.long) for part in range(1, 21)]


@pytest.mark.parametrize("part", [0, *LONG_PARTS])
def test_corpus_of_packaged_images_has_no_difference(images: NativeImages, part: int) -> None:
    """Each of 100 files is encoded in another way and read through three transforms, in the long
    form through all of them, with three seeds each."""
    draw = random.Random(part)
    count = 100
    sources = list(packaged_images())
    assert len(sources) >= 10
    compared = 0
    for number in range(count):
        source = sources[number % len(sources)]
        width, height = (draw.randint(40, 400) for _ in range(2))
        image = source.resize((width, height), Resampling.BICUBIC)
        encoding = {
            "quality": draw.randint(10, 100),
            "progressive": draw.random() < 0.3,
            "optimize": draw.random() < 0.5,
            "restart_marker_rows": draw.choice([0, 0, 1, 3]),
        }
        if image.mode == "RGB":
            encoding["subsampling"] = draw.choice([0, 1, 2])
        data = jpeg_of(image, **encoding)
        for name in draw.sample(list(CORPUS_TRANSFORMS), len(CORPUS_TRANSFORMS) if part else 3):
            for seed in range(3):
                made = []
                for open_image in (opened, by_pillow):
                    random.seed(seed)
                    torch.manual_seed(seed)
                    result = CORPUS_TRANSFORMS[name](open_image(data).convert("RGB"))
                    pictures = result if isinstance(result, tuple) else (result,)
                    made.append([functional.pil_to_tensor(one) for one in pictures])
                for ours, theirs in zip(*made, strict=True):
                    assert torch.equal(ours, theirs), (name, seed, image.size, encoding)
                    compared += 1
    print(f"{count} files, {compared} images compared, {images.comparisons.made} made natively")
    assert images.comparisons.made >= compared // 2
