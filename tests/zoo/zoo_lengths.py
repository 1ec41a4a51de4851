# SPDX-License-Identifier: Apache-2.0
"""Batches whose sizes differ from one to the next: bags of words and packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cut_models import Case
from torch import nn


class Bags(nn.Module):
    """Bags of words of varying length: values and offsets, hashed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(97, 6, mode="sum")
        self.head = nn.Linear(6, 2)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        offsets = torch.cumsum(lengths, 0) - lengths
        return self.head(self.bags((values * 31 + 7) % 97, offsets))


class Recurrent(nn.Module):
    """Padded sequences, packed by their lengths for an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = torch.log1p(x.abs())
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.cell(packed)[1][0][-1])


def bags(k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    lengths = torch.randint(1, 7, (8,), generator=g)
    values = torch.randint(0, 10_000, (int(lengths.sum()),), generator=g)
    return {"x": values, "lengths": lengths, "label": torch.randint(0, 2, (8,), generator=g)}


def sequences(k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return {
        "x": torch.randn(5, 9 + k % 2, 6, generator=g),
        "lengths": torch.randint(2, 9, (5,), generator=g),
        "label": torch.randint(0, 2, (5,), generator=g),
    }


def sequence_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["label"])


LENGTHS = [
    Case("bags", Bags, bags, sequence_loss, True, "bags of varying length", "symbolic sizes"),
    Case(
        "lstm",
        Recurrent,
        sequences,
        sequence_loss,
        True,
        "packed sequences",
        "packing is a graph break",
    ),
]
