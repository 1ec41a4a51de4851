# SPDX-License-Identifier: Apache-2.0
"""A program of several ranks, written for torch's loader, that runs unmodified with penstock's.

torchrun --nproc-per-node=2 -m penstock run examples/torchrun.py

For a loader that shards the samples itself, and resumes with other ranks, see ranks/ddp.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.rand(256, 2)
    dataset = TensorDataset(x, (6 * x[:, :1]).sin())
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, {type(loader).__module__}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
