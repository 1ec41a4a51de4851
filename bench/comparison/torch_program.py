# SPDX-License-Identifier: Apache-2.0
"""A program for torch's loader: two epochs of a small regression, with the arguments that training
programs use."""

from __future__ import annotations

import hashlib

import torch
from torch.utils.data import DataLoader


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.rand(16) + index / 512, torch.tensor(index / 512)


def first_seed(worker_id):
    torch.manual_seed(1000 + worker_id)


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        Noisy(),
        batch_size=24,
        shuffle=True,
        num_workers=2,
        drop_last=True,
        worker_init_fn=first_seed,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(3),
    )
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = hashlib.sha256()
    for _ in range(2):
        assert len(loader) == 21
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs)[:, 0], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.detach().numpy().tobytes())
    return losses.hexdigest()


if __name__ == "__main__":
    print(main())
