# SPDX-License-Identifier: Apache-2.0
"""Trains a network on camera images, with normalising and resizing offloaded.

To see which part could run in the workers, without training: `penstock explain examples/images.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import penstock


class ColourNet(nn.Module):
    """Takes images as uint8 [B, 3, H, W]."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, class_count: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.classifier = nn.Linear(16, class_count)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = (images.float() / 255 - self.mean) / self.std
        images = functional.interpolate(images, size=(64, 64), mode="bilinear", antialias=True)
        logits: torch.Tensor = self.classifier(self.stem(images).mean((2, 3)))
        return logits


def make_dataset(count: int) -> TensorDataset:
    images = torch.randint(0, 160, (count, 3, 160, 160), dtype=torch.uint8)
    labels = torch.randint(3, (count,))
    images[torch.arange(count), labels] += 80  # one colour for each class
    return TensorDataset(images, labels)


def main() -> None:
    torch.manual_seed(0)
    loader = penstock.DataLoader(make_dataset(512), batch_size=32, shuffle=True, num_workers=2)
    model = penstock.offload(ColourNet(class_count=3), loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.3f}")


if __name__ == "__main__":
    main()
