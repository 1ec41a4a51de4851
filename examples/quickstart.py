# SPDX-License-Identifier: Apache-2.0
"""Trains one model three times: torch's DataLoader, the import swapped, and the model offloaded.

Same photographs, same seed, same code; only the loader differs. The losses must be bit-for-bit
identical; if they are not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from options import parse_arguments
from photograph_crops import PHOTOGRAPHS, PhotographsError, prepare
from report import Run, write_json
from screen import Screen
from speed_picture import draw
from torch import nn
from torch.nn import functional
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

# glibc either returns a large freed block to the system, and faults it in again at the next step,
# or keeps it, depending on where some small block lies: 40 % of the speed, with any loader. These
# trainings keep their blocks, so that they differ by their loaders alone.
KEEP_FREED_MEMORY = dict.fromkeys(
    ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "1000000000"
)


class PhotographNet(nn.Module):
    """Takes photographs as stored, uint8 [B, 3, H, W]: preprocessing is part of the model."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, class_count: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        layers: list[nn.Module] = []
        for channels_in, channels in ((3, 16), (16, 32), (32, 64)):
            layers += [
                nn.Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(64, class_count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float() / 255
        x = (x - self.mean) / self.std
        x = functional.interpolate(x, size=(96, 96), mode="bilinear", antialias=True)
        logits: torch.Tensor = self.classifier(self.features(x))
        return logits


def decode(path: str) -> torch.Tensor:
    photograph: torch.Tensor = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return photograph


def with_torch(model: nn.Module, dataset: ImageFolder, **kwargs: Any) -> tuple[nn.Module, Any]:
    from torch.utils.data import DataLoader

    return model, DataLoader(dataset, **kwargs)


def with_swapped_import(
    model: nn.Module, dataset: ImageFolder, **kwargs: Any
) -> tuple[nn.Module, Any]:
    from penstock import DataLoader

    return model, DataLoader(dataset, **kwargs)


def with_offload(model: nn.Module, dataset: ImageFolder, **kwargs: Any) -> tuple[nn.Module, Any]:
    import penstock

    loader = penstock.DataLoader(dataset, **kwargs)
    return penstock.offload(model, loader), loader


WAYS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "torch": with_torch,
    "swapped": with_swapped_import,
    "offload": with_offload,
}


def train(way: str, data: Path, args: argparse.Namespace) -> Run:
    """Trains from scratch in one of the three ways and measures every step."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    augment = v2.Compose([v2.RandomCrop(288), v2.RandomHorizontalFlip()])
    dataset = ImageFolder(str(data / "train"), loader=decode, transform=augment)
    model, loader = WAYS[way](
        PhotographNet(len(PHOTOGRAPHS)),
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    run = Run(way, args.batch_size, args.warmup)
    before = ledger_of(loader)
    with Screen().training(way, args.epochs * len(loader)) as progress:
        for _ in range(args.epochs):
            asked = time.perf_counter()
            for photographs, labels in loader:
                got = time.perf_counter()
                loss = functional.cross_entropy(model(photographs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss.item(), wait_s=got - asked, end=time.perf_counter())
                progress.step(run)
                if len(run.losses) == args.warmup:
                    before = ledger_of(loader)
                asked = time.perf_counter()
    plan = getattr(loader, "plan", None)
    if before is not None:
        run.set_ledger(ledger_of(loader) - before)
    del loader
    run.accuracy = held_out_accuracy(way, model, data, args)
    run.set_plan(plan)
    return run


def ledger_of(loader: Any) -> Any:
    """How the time of the steps was spent until now; torch's loader does not report it."""
    return loader.stats().ledger if hasattr(loader, "stats") else None


def train_apart(way: str, data: Path, args: argparse.Namespace) -> Run:
    """The same in a fresh process, which is free of an earlier training's traces in the heap."""
    os.environ.update(KEEP_FREED_MEMORY)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
        return process.submit(train, way, data, args).result()


@torch.no_grad()
def held_out_accuracy(way: str, model: nn.Module, data: Path, args: argparse.Namespace) -> float:
    dataset = ImageFolder(str(data / "held_out"), loader=decode, transform=v2.CenterCrop(288))
    loader_of = with_torch if way == "torch" else with_swapped_import
    _, loader = loader_of(model, dataset, batch_size=args.batch_size, num_workers=args.workers)
    model.eval()
    right = 0
    for photographs, labels in loader:
        right += int((model(photographs).argmax(1) == labels).sum())
    return right / len(dataset)


def main() -> int:
    args = parse_arguments(__doc__)
    screen = Screen()
    screen.title(args)
    try:
        with screen.preparing(args.recipe.crop_count) as progress:
            prepare(args.data, args.recipe, progress.advance)
    except PhotographsError as err:
        screen.error(str(err))
        return 2
    runs = [train_apart(way, args.data, args) for way in args.ways]
    equal = screen.summary(runs)
    draw(runs, equal, args.picture)
    screen.wrote("picture", args.picture)
    if args.json is not None:
        write_json(runs, equal, args, args.json)
        screen.wrote("figures", args.json)
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
