# SPDX-License-Identifier: Apache-2.0
"""The training of the framework tests: a dataset with noise, and a linear model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Samples that contain random numbers of the worker: a wrong seed is a wrong loss."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / len(self)) + 0.1 * torch.rand(4), index % 2


def linear_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(4, 2)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One step of SGD. Returns its loss, of which every bit counts."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()
