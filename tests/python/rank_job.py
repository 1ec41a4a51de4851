# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that torchrun starts, for tests: it trains with DDP and writes what it was given.

    rank_job.py FOLDER '{"steps": 3, "workers": 1}'

Each rank appends a line of JSON a step to FOLDER/rank-R: the step's number, the indices and the
loss. After each step rank 0 saves the job's state to FOLDER/job.pt, from which the job goes on if
it is there. "lengths" are the dataset's by rank. "kill" names an attempt, a rank and a step in
which that rank kills itself. "absent" is a rank that never iterates; "wait_s" how long others wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock import DataLoader
from penstock.loader import job_store

STEP_SIZE = 12


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(4)


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    job_store.WAIT_S_MAX = given.get("wait_s", job_store.WAIT_S_MAX)
    length = given.get("lengths", [60] * dist.get_world_size())[rank]
    loader = DataLoader(
        Points(length),
        shuffle=True,
        num_workers=given.get("workers", 0),
        shard_by_rank=True,
        global_batch_size=STEP_SIZE,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = folder / "job.pt"
    step = 0
    if saved.exists():
        job = torch.load(saved)
        model.load_state_dict(job["model"])
        loader.load_state_dict(job["loader"])
        step = job["step"]
    if given.get("absent") == rank:
        time.sleep(given["wait_s"] + 20)
        return
    for indices, points in loader:
        if given.get("kill") == [attempt, rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(points).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        with (folder / f"rank-{rank}").open("a") as file:
            file.write(json.dumps([step, indices.tolist(), loss.item()]) + "\n")
        dist.barrier()
        if rank == 0:
            state = {"model": model.state_dict(), "loader": loader.state_dict(), "step": step}
            torch.save(state, folder / "job.new")
            (folder / "job.new").rename(saved)
        if step == given.get("steps"):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
