# SPDX-License-Identifier: Apache-2.0
"""The names that the code on the pages assumes: a dataset, a model, a loop's usual names."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import penstock
from penstock import DataLoader

__all__ = [
    "Any",
    "DataLoader",
    "Iterator",
    "Rows",
    "Stream",
    "accuracy",
    "criterion",
    "dataset",
    "device",
    "dist",
    "epochs",
    "functools",
    "get_worker_info",
    "loader",
    "make_model",
    "model",
    "nn",
    "os",
    "path",
    "penstock",
    "stream",
    "torch",
    "train_set",
    "val_set",
]

# The pages show parts of programs, without the main guard that every start method except fork
# needs.
multiprocessing.set_start_method("fork", force=True)


def images(count: int) -> TensorDataset:
    pixels = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8)
    return TensorDataset(pixels, torch.randint(10, (count,)))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Images and labels under names."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = torch.full((3, 8, 8), index % 256, dtype=torch.uint8)
        return {"image": image, "label": torch.tensor(index % 10)}


class Stream(IterableDataset[torch.Tensor]):
    """Each shard has a separate part of 1,024 numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor([float(number)]) for number in range(first, 1024, step))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(3 * 8 * 8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classify((images.float() / 255 - 0.5).flatten(1))
        return logits


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(1) == labels).float().mean().item()


torch.set_num_threads(1)
device = torch.device("cpu")  # without a GPU
criterion = nn.CrossEntropyLoss()
dataset = train_set = images(256)
val_set = images(128)
stream = Stream()
model = make_model()
loader: DataLoader[Any] = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2)
epochs = 2
path = "checkpoint.pt"
