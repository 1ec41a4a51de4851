# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, unmodified: after penstock.install() its loaders are penstock's.

python examples/trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers  # noqa: F401 - before or after install()
from torch.nn import functional

import penstock


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Eight digits; the label is whether their sum exceeds 36."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        digits = torch.randint(10, (8,), generator=torch.Generator().manual_seed(index))
        return {"digits": digits, "labels": (digits.sum() > 36).long()}


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Embedding(10, 16)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, digits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.value(digits).sum(1))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    penstock.install()
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = transformers.TrainingArguments(
            folder, num_train_epochs=5, per_device_train_batch_size=32, learning_rate=0.02,
            dataloader_num_workers=2, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(Counter(), arguments, train_dataset=Sums())
        print(f"loss {trainer.train().training_loss:.3f}")
        loader = trainer.get_train_dataloader().base_dataloader
        print(f"penstock's loader: {isinstance(loader, penstock.DataLoader)}")


if __name__ == "__main__":
    main()
