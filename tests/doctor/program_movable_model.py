# SPDX-License-Identifier: Apache-2.0
"""The model resizes and normalises its images before its first trained layer."""

from typing import Any

import torch
from planted_work import train
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[Any]):
    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (64, 3, 256, 256), dtype=torch.uint8)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        return self.images[index % len(self.images)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
        self.head = nn.Linear(3 * 32 * 32, 2)

    def forward(self, images: Any) -> Any:
        images = (images.float() / 255 - self.mean) / 0.25
        images = functional.interpolate(images, size=(32, 32), mode="bicubic", antialias=True)
        return self.head(images.flatten(1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    loader = DataLoader(Images(), batch_size=16, num_workers=1, persistent_workers=True)
    train(loader, step)
