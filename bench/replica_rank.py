# SPDX-License-Identifier: Apache-2.0
"""A rank of bench/replica_bytes.py: reads its batches, and prints the seconds that it took.

replica_rank.py '{"pool": "tcp://10.213.0.2:7000", "keys": "keys", "group": [0, 1, 2, 3]}'

With "has_labels", a batch has pixels and labels, and with "leaves" the ranks read some of them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from penstock import DataLoader, Pool, Ranks

BATCH_SIZE, STEP_COUNT = 64, 50
SHAPE = (3, 64, 64)  # of float32: 3 MiB a batch, which no narrower type holds


LABELS = 4096  # of 64 bits, all random: 2 MiB a batch


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCH_SIZE * STEP_COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(SHAPE) + index


class LabelledNoise(Noise):
    def __getitem__(self, index: int) -> Any:
        labels = torch.randint(-(1 << 63), (1 << 63) - 1, (LABELS,))
        return {"pixels": super().__getitem__(index), "labels": labels}


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    group = given.get("group")
    loader = DataLoader(
        LabelledNoise() if given.get("has_labels") else Noise(),
        BATCH_SIZE,
        shuffle=True,
        ranks=Ranks(rank=0, world_size=1, replica_group=group, leaves=given.get("leaves")),
        pool=Pool(given["pool"], keys=given["keys"]),
    )
    dist.barrier()
    begun = time.perf_counter()
    count = sum(1 for _ in loader)
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"steps": count, "seconds": time.perf_counter() - begun}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
