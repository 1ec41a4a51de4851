# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with penstock's loaders, with its model's preprocessing in their workers.

python examples/lightning_training.py
"""

from __future__ import annotations

from typing import Any

import torch
from images import ColourNet, make_dataset
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn import functional

import penstock
from penstock import DataLoader


class Classifier(LightningModule):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    seed_everything(0, verbose=False)
    train = DataLoader(make_dataset(512), batch_size=32, shuffle=True, num_workers=2)
    val = DataLoader(make_dataset(128), batch_size=64, num_workers=1)
    net = penstock.offload(ColourNet(class_count=3), train, val)
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(net), train, val)
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.2f}")
    print("training:", str(train.plan).partition("\n\n")[0])


if __name__ == "__main__":
    main()
