# SPDX-License-Identifier: Apache-2.0
"""The photographs of bench/images.py by other loaders, as their documentation has it: Grain, which
runs the same dataset in processes, SPDL and DALI, which have their own decoders and resizes.

Each class takes the files with their labels, and is an endless iterator of batches of float32
[batch, 3, size, size] and labels. Their random crops are their own, so the stream is not torch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Batches = Iterator[Any]
Samples = list[tuple[str, int]]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class _Arrays:
    """A dataset whose tensors are arrays, which Grain batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        image, label = self._dataset[int(index)]
        return image.numpy(), label


def grain(dataset: Any, samples: Samples, size: int, batch_size: int, workers: int) -> Batches:
    import grain.python as grain_python

    loader = grain_python.DataLoader(
        data_source=_Arrays(dataset),
        sampler=grain_python.IndexSampler(
            len(dataset), grain_python.NoSharding(), shuffle=True, num_epochs=None, seed=0
        ),
        operations=[grain_python.Batch(batch_size, drop_remainder=True)],
        worker_count=workers,
    )
    for images, labels in loader:
        yield torch.from_numpy(images), torch.from_numpy(np.asarray(labels))


def dali(dataset: Any, samples: Samples, size: int, batch_size: int, workers: int) -> Batches:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=batch_size, num_threads=workers, device_id=None, seed=0)
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            files=[path for path, _ in samples],
            labels=[label for _, label in samples],
            random_shuffle=True,
            name="reader",
        )
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_area=list(AREA),
            random_aspect_ratio=list(RATIO),
        )
        images = fn.resize(images, resize_x=size, resize_y=size, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(),
        )
        return images, labels

    batches = DALIGenericIterator(
        [pipeline()], ["images", "labels"], reader_name="reader", auto_reset=True
    )
    while True:
        for (batch,) in batches:
            yield batch["images"], batch["labels"]


def spdl(dataset: Any, samples: Samples, size: int, batch_size: int, workers: int) -> Batches:
    import spdl.io
    from PIL import Image
    from spdl.pipeline import PipelineBuilder
    from torchvision.transforms import RandomResizedCrop

    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    draw = random.Random(0)

    def source() -> Iterator[tuple[str, int]]:
        while True:
            yield from draw.sample(samples, len(samples))

    def load(sample: tuple[str, int]) -> Any:
        path, label = sample
        with Image.open(path) as image:  # whose header has the size
            width_and_height = Image.new("1", image.size)
        top, left, height, width = RandomResizedCrop.get_params(
            width_and_height, list(AREA), list(RATIO)
        )
        flip = ",hflip" if draw.random() < 0.5 else ""
        steps = (
            f"crop={width}:{height}:{left}:{top},scale={size}:{size}{flip},format=pix_fmts=rgb24"
        )
        frames = spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=steps)
        return frames, label

    def batch(loaded: list[Any]) -> Any:
        frames, labels = zip(*loaded, strict=True)
        pixels = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
        images = pixels.permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(std)
        return images, torch.tensor(labels)

    builder = PipelineBuilder().add_source(source()).pipe(load, concurrency=workers)
    pipeline = builder.aggregate(batch_size, drop_last=True).pipe(batch).add_sink(2)
    with pipeline.build(num_threads=workers) as running:
        yield from running


PEERS: dict[str, Callable[..., Batches]] = {"grain": grain, "dali": dali, "spdl": spdl}
