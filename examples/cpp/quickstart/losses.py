# SPDX-License-Identifier: Apache-2.0
"""The training of quickstart.cpp in Python: the model of examples/quickstart.py, the same seeds.

Prints the loss of each step, as the C++ program does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import penstock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from quickstart import PhotographNet, decode


def train(folder: str, epochs: int, workers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PhotographNet(16)
    augment = v2.Compose([v2.RandomCrop(288), v2.RandomHorizontalFlip()])
    dataset = ImageFolder(folder, loader=decode, transform=augment)
    loader: Any = penstock.DataLoader(
        dataset,
        batch_size=32,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        seeding="batch",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.9g}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    train(arguments[0], *(int(number) for number in [*arguments[1:3], 1, 2][:2]))
