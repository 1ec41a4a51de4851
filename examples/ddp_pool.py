# SPDX-License-Identifier: Apache-2.0
"""DDP whose ranks get their batches from one pool, which the same command starts.

penstock run --pool-local 2 -m torch.distributed.run --nproc-per-node=2 examples/ddp_pool.py

With PENSTOCK_POOL set to the address of another pool, torchrun alone starts it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import DataLoader, Ranks


class NoisyPoints(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / len(self), 1 - index / len(self)]) + 0.1 * torch.rand(2)
        return x, (6 * x[:1]).sin()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # A step has 32 samples for any number of ranks. Each rank has one local worker in addition to
    # the pool's.
    loader = DataLoader(
        NoisyPoints(), shuffle=True, num_workers=1, ranks=Ranks(global_batch_size=32)
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    source = loader.stats().iterator
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, from a {source}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
