# SPDX-License-Identifier: Apache-2.0
"""The plan of a sample names the calls of the program, and which of them are native."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision import datasets, io, transforms
from torchvision.transforms import functional, v2

import penstock
from penstock import SamplePlan, explain_sample
from penstock.images.sample_plan import reads_images, sample_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    (root / "one").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    Image.fromarray(noise).save(root / "one" / "0.jpg", quality=90)
    Image.fromarray(noise).save(root / "one" / "1.bmp")
    return root


class Counted:
    """A transform of the program's own."""

    def __call__(self, image: Any) -> Any:
        return functional.rotate(image.crop((0, 0, 50, 40)), 10)


class Handwritten(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*"))

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as image:
            rgb = image.convert("RGB").resize((64, 64), Image.Resampling.BICUBIC)
        if random.random() < 0.5:
            rgb = rgb.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return functional.to_tensor(rgb)


TRAINING = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(1.0),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.25] * 3),
    ]
)


def steps_of(plan: SamplePlan) -> list[tuple[str, bool]]:
    return [(step.name, step.is_native) for step in plan.steps]


def test_image_folder_with_transforms_of_training_is_native_up_to_normalize(folder: Path) -> None:
    plan = explain_sample(datasets.ImageFolder(str(folder), TRAINING))
    assert plan.refused == ""
    assert steps_of(plan) == [
        ("Image.open", True),
        ("JpegImageFile.convert", True),
        ("RandomResizedCrop", True),
        ("RandomHorizontalFlip", True),
        ("ToTensor", True),
        ("Normalize", False),
    ]
    details = [step.detail for step in plan.steps]
    assert details[0] == "a JPEG file of 400x300"
    assert re.fullmatch(
        r"makes float32 \[3, 224, 224\]: window \(.*\), resize to 224x224 by filter 2, .*, "
        r"flip columns",
        details[4],
    )
    assert details[5] == "the library's: works on a tensor"
    assert all(step.seconds > 0 for step in plan.steps)
    assert "A sample of ImageFolder: 5 of 6 steps are native" in str(plan)
    assert {step.line for step in plan.steps} == {""}


def test_changes_of_colours_are_native(folder: Path) -> None:
    class Coloured(Handwritten):
        def __getitem__(self, index: int) -> Any:
            image = Image.open(self.paths[index]).convert("RGB")
            image = ImageEnhance.Contrast(image).enhance(1.25)
            image = ImageOps.expand(functional.adjust_hue(image, 0.1), 3)
            return functional.to_tensor(functional.rotate(image, 10))

    plan = explain_sample(Coloured(folder))
    assert steps_of(plan) == [
        ("Image.open", True),
        ("JpegImageFile.convert", True),
        ("ImageEnhance.enhance", True),
        ("functional.adjust_hue", True),
        ("ImageOps.expand", True),
        ("functional.rotate", False),
        ("functional.to_tensor", False),
    ]
    first = Coloured.__getitem__.__code__.co_firstlineno
    assert plan.steps[2].line == f"test_sample_plan.py:{first + 2}"
    assert "contrast 1.25, hue 25, pad (3, 3, 3, 3, 0, 0, 0)" in plan.steps[5].detail
    for version in (transforms, v2):
        jitter = [version.ColorJitter(0.4, 0.4, 0.4, 0.1), version.RandomGrayscale(1.0)]
        transform = transforms.Compose([*jitter, transforms.ToTensor()])
        plan = explain_sample(datasets.ImageFolder(str(folder), transform))
        assert steps_of(plan)[2:] == [
            ("ColorJitter", True),
            ("RandomGrayscale", True),
            ("ToTensor", True),
        ]


def test_handwritten_dataset_shows_its_own_lines(folder: Path) -> None:
    plan = explain_sample(Handwritten(folder))
    assert [name for name, _ in steps_of(plan)][:3] == [
        "Image.open",
        "JpegImageFile.convert",
        "Image.resize",
    ]
    assert plan.steps[-1].name == "functional.to_tensor" and plan.steps[-1].is_native
    first = Handwritten.__getitem__.__code__.co_firstlineno
    assert plan.steps[0].line == f"test_sample_plan.py:{first + 1}"
    assert plan.steps[2].line == f"test_sample_plan.py:{first + 2}"


def test_tensors_of_torchvision_are_its_own(folder: Path) -> None:
    transform = v2.Compose([v2.RandomCrop(40), v2.ToDtype(torch.float32)])
    plan = explain_sample(datasets.ImageFolder(str(folder), transform, loader=io.decode_image))
    assert steps_of(plan) == [
        ("image.decode_image", False),
        ("RandomCrop", False),
        ("ToDtype", False),
    ]
    assert {step.detail for step in plan.steps} == {"the library's: works on a tensor"}


def test_images_that_a_dataset_keeps_stay_usable(folder: Path) -> None:
    class Keeping(Handwritten):
        kept: Any = None

        def __getitem__(self, index: int) -> Any:
            image = Image.open(self.paths[index]).convert("RGB")
            self.kept = self.kept or image
            return image.resize((64, 64))

    dataset = Keeping(folder)
    explain_sample(dataset)
    with Image.open(dataset.paths[0]) as image:
        assert dataset.kept.tobytes() == image.tobytes()


def test_steps_of_pillow_have_their_reason(folder: Path) -> None:
    bmp = explain_sample(datasets.ImageFolder(str(folder), TRAINING), 1)
    assert not any(is_native for _, is_native in steps_of(bmp))
    assert bmp.steps[0].detail == "the library's: a BMP file of mode RGB"
    own = explain_sample(datasets.ImageFolder(str(folder), Counted()))
    assert steps_of(own)[2:] == [("Image.crop", True), ("functional.rotate", False)]
    assert "Pillow's own code reads the pixels" in own.steps[-1].detail


def test_generators_and_pillow_are_as_before(folder: Path) -> None:
    Image.init()
    before = Image.OPEN["JPEG"], functional.to_tensor
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    explain_sample(datasets.ImageFolder(str(folder), TRAINING))
    assert (Image.OPEN["JPEG"], functional.to_tensor) == before
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(states[0], after[0]) and states[1:] == after[1:]


def test_raising_dataset_leaves_pillow_as_before(folder: Path) -> None:
    Image.init()
    before = Image.OPEN["JPEG"]
    calls = []

    class Raising(Handwritten):
        def __getitem__(self, index: int) -> Any:
            calls.append(index)
            if len(calls) > 7:
                raise KeyError("the eighth")
            return super().__getitem__(index)

    with pytest.raises(KeyError, match="the eighth"):
        explain_sample(Raising(folder))
    assert Image.OPEN["JPEG"] == before


def test_variable_and_iterable_datasets_are_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NATIVE_IMAGES", "0")
    plan = explain_sample(Handwritten(folder))
    assert plan.refused == "PENSTOCK_NATIVE_IMAGES=0 is set"
    assert not any(is_native for _, is_native in steps_of(plan))
    assert plan.seconds == plan.seconds_before

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(TypeError, match=r"dataset must be map-style, got the iterable-style Str"):
        explain_sample(Stream())
    with pytest.raises(TypeError, match=r"dataset must be map-style, with __getitem__, got obj"):
        explain_sample(object())


class Numbers(torch.utils.data.Dataset[Any]):
    """Not of this module, which refers to Pillow."""

    __module__ = "numbers"


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield Image.new("RGB", (2, 2))


def test_datasets_of_images_are_recognised(folder: Path) -> None:
    images = datasets.ImageFolder(str(folder), TRAINING)
    half = torch.utils.data.Subset(images, [0])
    for dataset in (images, Handwritten(folder), half, torch.utils.data.ConcatDataset([half])):
        assert reads_images(dataset)
    table = torch.utils.data.TensorDataset(torch.ones(2))
    for other in (table, Numbers(), Endless(), torch.utils.data.Subset(table, [0]), [1, 2], None):
        assert not reads_images(other)


def test_plan_of_a_loader_names_the_call_that_explains_a_sample(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))
    loader = penstock.DataLoader(datasets.ImageFolder(str(folder), TRAINING), batch_size=2)
    assert loader.plan is None
    loader._run.plan = penstock.explain(model, torch.ones(2, 3, 4, 4))
    for text in (str(loader.plan), loader.plan.table()):
        assert "\nThe samples are images: print(penstock.explain_sample(loader.dataset))" in text
    loader = penstock.DataLoader(torch.utils.data.TensorDataset(torch.ones(2)))
    loader._run.plan = penstock.explain(model, torch.ones(2, 3, 4, 4))
    assert loader.plan is not None and loader.plan.sample == ""


def test_dataset_that_raises_does_not_lose_the_plan(folder: Path) -> None:
    class Raising(Handwritten):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such image")

    assert sample_text(Raising(folder)) == (
        "Its first sample could not be explained: KeyError: 'no such image'"
    )
