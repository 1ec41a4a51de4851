# SPDX-License-Identifier: Apache-2.0
"""Photographs: decode a JPEG, random resized crop to 224, flip, to float, normalise; batch 64."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from workloads.workload import Workload, fetch_samples

FILES = {
    "skimage": ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png",
                "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
    "sklearn": ("china.jpg", "flower.jpg"),
}  # fmt: skip
FOLDERS = {"skimage": "data", "sklearn": "datasets/images"}


def prepare(folder: Path, quick: bool) -> None:
    """Writes crops of the packaged photographs as JPEGs of 500x375, about 45 KB each."""
    crop_count = 13 if quick else 103  # of each photograph
    draw = random.Random(0)
    for package, names in FILES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"install {package}, whose photographs are the data")
        for name in names:
            label = folder / Path(name).stem
            label.mkdir()
            file = Path(spec.origin).parent / FOLDERS[package] / name
            photograph = Image.open(file).convert("RGB")
            for index in range(crop_count):
                height = draw.randint(photograph.height // 2, photograph.height * 3 // 4)
                width = height * 4 // 3
                left = draw.randint(0, max(0, photograph.width - width))
                top = draw.randint(0, photograph.height - height)
                crop = photograph.crop((left, top, left + width, top + height))
                crop = crop.resize((500, 375), Image.Resampling.BICUBIC)
                crop.save(label / f"{index:04}.jpg", quality=90)


def decode(path: str) -> torch.Tensor:
    photograph: torch.Tensor = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return photograph


def build(folder: Path) -> dict[str, Any]:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    dataset = ImageFolder(str(folder), loader=decode, transform=transform)
    # Eight times round the files is an epoch, so that a run is not made of ends of epochs.
    dataset.samples *= 8
    return {"dataset": dataset, "batch_size": 64, "shuffle": True, "drop_last": True}


WORKLOAD = Workload(
    "photographs",
    build,
    fetch_samples,
    work_is="the samples of each batch, no collate, 2 processes",
    prepare=prepare,
    floor=1.3,
)
