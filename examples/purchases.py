# SPDX-License-Identifier: Apache-2.0
"""Trains a wide and deep network on a table; its forward makes features larger than the rows.

See which part could and should run in the workers: `penstock explain examples/purchases.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SHOPS, ITEMS = 50, 1000


class PurchaseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Buffer(torch.logspace(0, 4, 31))
        self.item = nn.Embedding(ITEMS, 16)
        self.wide = nn.Linear(32 * SHOPS, 1)
        self.deep = nn.Sequential(nn.Linear(16 + 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, paid: torch.Tensor, shop: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        step = torch.bucketize(paid[:, 0].contiguous(), self.steps)
        crossed = functional.one_hot(shop * 32 + step, 32 * SHOPS).float()
        paid = torch.log1p(paid)
        paid = (paid - paid.mean(1, keepdim=True)) / (paid.std(1, keepdim=True) + 1)
        return (self.wide(crossed) + self.deep(torch.cat([self.item(item), paid], 1))).squeeze(1)


class Purchases(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.paid = torch.randn(count, 8).exp() * 100
        self.shop, self.item = torch.randint(SHOPS, (count,)), torch.randint(ITEMS, (count,))

    def __len__(self) -> int:
        return len(self.shop)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        returned = (self.paid[k, 0] > 150).float()
        return {"paid": self.paid[k], "shop": self.shop[k], "item": self.item[k], "y": returned}


def main() -> None:
    torch.manual_seed(0)
    model = PurchaseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in DataLoader(Purchases(8192), batch_size=256, shuffle=True, num_workers=2):
        y = batch.pop("y")
        loss = functional.binary_cross_entropy_with_logits(model(**batch), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.3f}")


if __name__ == "__main__":
    main()
