# SPDX-License-Identifier: Apache-2.0
"""The training task of the examples in this folder: a small network on points with random noise.

All of them have bit-for-bit the same losses: the loader gives each step the same samples and noise
in any framework.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock import DataLoader, Ranks

EPOCHS = 2


class NoisyPoints(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / len(self), 1 - index / len(self)])
        return {"x": x + 0.1 * torch.rand(2), "y": (6 * x[:1]).sin()}


def make_loader(**options: Any) -> DataLoader[Any]:
    """A step has 16 samples for any number of ranks. Call after the ranks have met."""
    options = {"shuffle": True, "num_workers": 1, **options}
    return DataLoader(NoisyPoints(), ranks=Ranks(global_batch_size=16), **options)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def report(rank: int, losses: list[float]) -> None:
    print(f"rank {rank}: losses {losses}\n", end="", flush=True)
