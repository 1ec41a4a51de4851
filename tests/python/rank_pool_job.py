# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that is served by a pool, for tests.

    rank_pool_job.py FOLDER '{"announce": "tcp://127.0.0.1:7000", "seconds": [0.02, 0.1]}'

Rank 0 announces the pool. Each rank appends a line of JSON per step to FOLDER/rank-R: its indices.
"seconds" is how long a worker takes per sample, by rank; with "lockstep" the ranks meet at the end
of each step. "steps" ends the epoch early.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import penstock

LENGTH, STEP_SIZE = 6000, 12


class Slow(torch.utils.data.Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, torch.rand(4)


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        penstock.announce_pool(given["announce"])
    dist.barrier()
    loader = penstock.DataLoader(
        Slow(given["seconds"][rank]),
        shuffle=True,
        num_workers=1,
        ranks=penstock.Ranks(global_batch_size=STEP_SIZE),
    )
    with (folder / f"rank-{rank}").open("a", buffering=1) as file:
        for step, (indices, points) in enumerate(loader):
            file.write(json.dumps([indices.tolist(), points.tolist()]) + "\n")
            if given.get("lockstep"):
                dist.barrier()
            if step + 1 == given.get("steps"):
                break
    if given.get("lockstep"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
