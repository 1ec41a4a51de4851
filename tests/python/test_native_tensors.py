# SPDX-License-Identifier: Apache-2.0
"""JPEG files that torchvision decodes, and of which a program uses a part, have its pixels."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets, io, transforms, tv_tensors
from torchvision.transforms import v2

from penstock import DataLoader
from penstock.images import lazy_tensors, native_images
from penstock.images.lazy_tensors import LazyTensor, TensorDecoder


def noise(channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    small = torch.rand((1, channels, height // 4 + 2, width // 4 + 2), generator=draw) * 255
    smooth = torch.nn.functional.interpolate(small, (height, width), mode="bicubic")
    return smooth.clamp(0, 255).to(torch.uint8)[0]


def jpeg_of(image: torch.Tensor, quality: int = 90) -> torch.Tensor:
    return io.encode_jpeg(image, quality)


FILE = jpeg_of(noise(3, 40, 50))


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorDecoder]:
    """Lazy tensors in this process, which are not compared by themselves."""
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 0)
    installed = lazy_tensors.install()
    assert isinstance(installed, TensorDecoder), installed
    yield installed
    assert installed.refusal == ""
    lazy_tensors.uninstall()


def by_torchvision(file: torch.Tensor, mode: Any = io.ImageReadMode.UNCHANGED) -> torch.Tensor:
    operator = torch.ops.image.decode_jpeg
    return getattr(operator, "original", operator)(file, mode.value, False)


def test_crops_have_torchvisions_bytes_and_strides(decoder: TensorDecoder) -> None:
    draw = random.Random(0)
    for number in range(150):
        height, width = draw.randint(1, 200), draw.randint(1, 200)
        file = jpeg_of(noise(3, height, width, number), draw.randint(30, 100))
        top, left = draw.randrange(height), draw.randrange(width)
        bottom, right = draw.randint(top + 1, height), draw.randint(left + 1, width)
        lazy = io.decode_jpeg(file)
        assert type(lazy) is LazyTensor and tuple(lazy.shape) == (3, height, width)
        ours = lazy[..., top:bottom, left:right]
        theirs = by_torchvision(file)[..., top:bottom, left:right]
        assert type(ours) is torch.Tensor
        assert torch.equal(ours, theirs)
        assert (ours.stride(), ours.storage_offset()) == (theirs.stride(), theirs.storage_offset())
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert decoder.comparisons.made == 150


@pytest.mark.parametrize(
    "use",
    [
        lambda one: one,
        lambda one: one.float() / 255,
        lambda one: one[0],
        lambda one: one[:, ::2, 3:9],
        lambda one: one[..., -7:, :-3],
        lambda one: one[..., 5:5, :],
        lambda one: one[None],
        lambda one: one.mul_(2),
        lambda one: torch.stack([one, one]),
        lambda one: torch.cat([one, one], 1),
        lambda one: one.numpy().copy(),
        lambda one: np.asarray(one),
        lambda one: one.permute(1, 2, 0).contiguous(),
        lambda one: torch.as_tensor(one).clone(),
        lambda one: tv_tensors.Image(one),
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: copy.deepcopy(one),
        lambda one: one.tolist(),
        lambda one: list(one),
        lambda one: torch.jit.script(transforms.Resize((20, 30)))(one),
        lambda one: transforms.ConvertImageDtype(torch.float32)(one),
        lambda one: transforms.FiveCrop(10)(one),
        lambda one: v2.Resize((31, 17))(one),
        lambda one: torch.ops.aten.flip(one, [2]),
        lambda one: (one.shape, one.dtype, one.ndim, one.device, one.is_contiguous()),
        lambda one: str(one),
        lambda one: one.sum().item(),
    ],
)
def test_every_use_gives_the_result_of_torchvision(decoder: TensorDecoder, use: Any) -> None:
    file = jpeg_of(noise(3, 50, 70))
    ours, theirs = use(io.decode_jpeg(file)), use(by_torchvision(file))
    pairs = [result if isinstance(result, tuple) else (result,) for result in (ours, theirs)]
    for one, other in zip(*pairs, strict=True):
        assert type(one) is type(other) or type(one) is LazyTensor
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other) and one.stride() == other.stride()
        else:
            assert np.array_equal(one, other)


def test_changed_tensor_keeps_its_changes(decoder: TensorDecoder) -> None:
    lazy = io.decode_jpeg(jpeg_of(noise(3, 50, 70)))
    lazy[0, 1, 2] = 77
    assert lazy[0, 1, 2] == 77 and lazy[..., 1:2, 2:3][0].item() == 77


@pytest.mark.parametrize("mode", list(io.ImageReadMode))
@pytest.mark.parametrize("channels", [1, 3])
def test_modes_are_torchvisions(decoder: TensorDecoder, mode: Any, channels: int) -> None:
    file = jpeg_of(noise(channels, 40, 30))
    try:
        theirs = by_torchvision(file, mode)
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as raised:
            io.decode_jpeg(file, mode)
        assert str(raised.value).splitlines()[0] == str(error).splitlines()[0]
        return
    ours = io.decode_jpeg(file, mode)
    assert torch.equal(ours[..., 3:20, 5:25], theirs[..., 3:20, 5:25])
    assert torch.equal(io.decode_image(file, mode), theirs)


def test_damaged_files_raise_where_torchvision_raises(decoder: TensorDecoder) -> None:
    file, draw = jpeg_of(noise(3, 60, 80)), random.Random(0)
    parts = [file[:end] for end in range(3, file.numel(), file.numel() // 40)]
    for _ in range(200):
        changed = file.clone()
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(changed.numel())] = draw.randrange(256)
        parts.append(changed)
    for part in parts:
        try:
            theirs = by_torchvision(part)
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as raised:
                io.decode_jpeg(part)
            assert str(raised.value).splitlines()[0] == str(error).splitlines()[0]
        else:
            height, width = theirs.shape[1:]
            box = (..., slice(height // 4, height // 2 + 1), slice(width // 4, width // 2 + 1))
            assert torch.equal(io.decode_jpeg(part)[box], theirs[box])


def test_png_files_and_lists_are_torchvisions(decoder: TensorDecoder) -> None:
    image = noise(3, 20, 30)
    assert torch.equal(io.decode_image(io.encode_png(image)), image)
    files = [jpeg_of(image), jpeg_of(noise(3, 30, 20))]
    for ours, file in zip(io.decode_jpeg(files), files, strict=True):
        assert torch.equal(ours, by_torchvision(file))


def test_first_difference_ends_the_use(
    decoder: TensorDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_images, "COMPARED_FIRST", 3)
    file = jpeg_of(noise(3, 40, 30))
    decoded = decoder._decoded
    with monkeypatch.context() as wrong:
        wrong.setattr(decoder, "_decoded", lambda *one: torch.zeros_like(decoded(*one)))
        with pytest.warns(match=r"window \(2, 1, 5, 8\) of a JPEG file differs"):
            part = io.decode_jpeg(file)[..., 1:9, 2:7]
    assert torch.equal(part, by_torchvision(file)[..., 1:9, 2:7])
    assert type(io.decode_jpeg(file)) is torch.Tensor
    decoder.refusal = ""


def read(path: str) -> torch.Tensor:
    return io.decode_image(io.read_file(path), mode=io.ImageReadMode.RGB)


PIPELINES: dict[str, Any] = {
    "v2": v2.Compose(
        [
            v2.RandomResizedCrop(64, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    ),
    "v1": transforms.Compose(
        [
            transforms.RandomCrop(48, pad_if_needed=True),
            transforms.RandomResizedCrop(64),
            transforms.ConvertImageDtype(torch.float32),
        ]
    ),
    "images": v2.Compose([tv_tensors.Image, v2.CenterCrop(64), v2.ToPureTensor()]),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_stream_of_an_image_folder_is_torchs(tmp_path: Path, name: str) -> None:
    (tmp_path / "one").mkdir()
    draw = random.Random(2)
    for number in range(40):
        image = noise(
            1 + 2 * (number % 5 > 0), draw.randint(70, 200), draw.randint(70, 200), number
        )
        path = tmp_path / "one" / f"{number:02}.jpg"
        io.write_file(str(path), jpeg_of(image) if number % 7 else io.encode_png(image))
    dataset = datasets.ImageFolder(str(tmp_path), PIPELINES[name], loader=read)
    streams = []
    for make in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(3)
        loader: Any = make(dataset, batch_size=8, shuffle=True, num_workers=2)
        streams.append([batch for _ in range(2) for batch in loader])
    for theirs, ours in zip(*streams, strict=True):
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


@pytest.mark.parametrize("setting", ["warnings", "device"])
def test_settings_of_the_program_do_no_harm(tmp_path: Path, setting: str) -> None:
    class Files(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ops.image.decode_jpeg(FILE, 0, False)[..., 3:9, 4:8].float()

    def set_up(_: int) -> None:
        if setting == "warnings":
            warnings.simplefilter("error")
        else:
            torch.set_default_device("meta")

    loader = DataLoader(Files(), batch_size=4, num_workers=1, worker_init_fn=set_up)
    expected = by_torchvision(FILE)[..., 3:9, 4:8].float()
    for batch in loader:
        assert all(torch.equal(one, expected) for one in batch)


def test_workers_decode_windows(tmp_path: Path) -> None:
    class Files(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            before = 0 if lazy_tensors._decoder is None else lazy_tensors._decoder.comparisons.made
            io.decode_jpeg(jpeg_of(noise(3, 40, 50, index)))[..., 3:9, 4:8].sum()
            assert lazy_tensors._decoder is not None
            return lazy_tensors._decoder.comparisons.made - before

    loader = DataLoader(Files(), batch_size=4, num_workers=1)
    assert torch.cat(list(loader)).tolist() == [1] * 12
