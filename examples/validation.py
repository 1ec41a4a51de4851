# SPDX-License-Identifier: Apache-2.0
"""Training with validation: one call of offload for both loaders, each with a separate cut.

python examples/validation.py
"""

from __future__ import annotations

import torch
from images import ColourNet, make_dataset
from torch.nn import functional

import penstock
from penstock import DataLoader

EPOCHS = 3


def train_epoch(
    model: torch.nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> float:
    model.train()
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy_of(model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)


def main() -> None:
    torch.manual_seed(0)
    train = DataLoader(
        make_dataset(512), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True
    )
    val = DataLoader(make_dataset(128), batch_size=64, num_workers=1, persistent_workers=True)
    model = penstock.offload(ColourNet(class_count=3), train, val)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        loss = train_epoch(model, train, optimizer)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy_of(model, val):.2f}")
    for name, loader in (("training", train), ("validation", val)):
        print(f"{name}:", str(loader.plan).partition("\n\n")[0])


if __name__ == "__main__":
    main()
