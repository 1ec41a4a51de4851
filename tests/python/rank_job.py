# SPDX-License-Identifier: Apache-2.0
"""A rank of a job started by torchrun, for tests: it trains and writes its inputs and results.

    rank_job.py FOLDER '{"steps": 3, "workers": 1}'

Each rank appends a line of JSON per step to FOLDER/rank-R: the step's number, the indices, the
inputs and the loss. Rank 0 saves the job's state after each step, or after every "save_every", to
FOLDER/job.pt, and the job resumes from this file if it exists. "wrap" is "ddp" or "fsdp2".
"lengths" are the dataset's by rank, and "share" is how ranks share a step. "kill" names an
attempt, a rank and a step in which that rank kills itself; "pause" is a step before which each rank
writes FOLDER/paused-R and waits for FOLDER/go. "absent" is a rank that never iterates; "wait_s" is
how long others wait.
FOLDER/joined-A-R exists once rank R of attempt A has met the others.
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import DataLoader, Ranks
from penstock.ranks import job_store

STEP_SIZE = 12
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(4)


def wrapped(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "ddp":
        # DDP reorders its buckets after its first step, which changes the sums of more than 2
        # ranks: a restarted job would differ in the last bits. With find_unused_parameters it keeps
        # the first order.
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh)
    return model


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dist.init_process_group("gloo")
    dist.barrier()
    rank = dist.get_rank()
    (folder / f"joined-{attempt}-{rank}").touch()
    job_store.WAIT_S_MAX = given.get("wait_s", job_store.WAIT_S_MAX)
    length = given.get("lengths", [60] * dist.get_world_size())[rank]
    loader = DataLoader(
        Points(length),
        shuffle=True,
        num_workers=given.get("workers", 0),
        ranks=Ranks(global_batch_size=STEP_SIZE, share=given.get("share")),
    )
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = wrapped(torch.nn.Sequential(*layers), given.get("wrap", "ddp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = folder / "job.pt"
    step = 0
    if saved.exists():
        job = torch.load(saved)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=job["model"],
            optim_state_dict=job["optimizer"],
            options=WHOLE,
        )
        loader.load_state_dict(job["loader"])
        step = job["step"]
    if given.get("absent") == rank:
        time.sleep(given["wait_s"] + 20)
        return
    for indices, points in loader:
        if given.get("kill") == [attempt, rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        if given.get("pause") == step:
            wait_for_go(folder, rank)
        optimizer.zero_grad()
        loss = (model(points) - points.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        with (folder / f"rank-{rank}").open("a") as file:
            file.write(json.dumps([step, indices.tolist(), points.tolist(), loss.item()]) + "\n")
        if step % given.get("save_every", 1) == 0:
            save(saved, model, optimizer, loader, step)
        if step == given.get("steps"):
            break
    dist.destroy_process_group()


def wait_for_go(folder: Path, rank: int) -> None:
    (folder / f"paused-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


def save(path: Path, model: Any, optimizer: Any, loader: Any, step: int) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=WHOLE)
    dist.barrier()
    if dist.get_rank() == 0:
        state = {"model": of_model, "optimizer": of_optimizer, "step": step}
        torch.save({**state, "loader": loader.state_dict()}, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    dist.barrier()  # A rank that kills itself next does not end rank 0 before it has saved.


if __name__ == "__main__":
    main()
