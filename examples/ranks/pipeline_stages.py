# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: two stages take the same batches, and each receives the tensor it reads.

torchrun --nproc-per-node=2 examples/ranks/pipeline_stages.py --state job.pt --stop-after 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from task import EPOCHS, NoisyPoints, make_model, make_optimizer, report
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from penstock import DataLoader, Ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, help="file; if it exists, continue from it")
    parser.add_argument("--stop-after", type=int, help="the number of a step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = Ranks(rank=0, world_size=1, replica_group=[0, 1], leaves={"x": [0], "y": [1]})
    loader = DataLoader(NoisyPoints(), 16, shuffle=True, num_workers=1, ranks=ranks)
    layers = make_model()
    part = layers[:2] if rank == 0 else layers[2:]
    optimizer = make_optimizer(part)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=functional.mse_loss)
    epoch, step, losses = 0, 0, []
    state = None if args.state is None else args.state.with_suffix(f".{rank}")
    if state is not None and state.exists():
        job = torch.load(state)
        part.load_state_dict(job["part"])
        optimizer.load_state_dict(job["optimizer"])
        loader.load_state_dict(job["loader"])
        epoch, step = job["epoch"], job["step"]
    while epoch < EPOCHS and step != args.stop_after:
        for batch in loader:  # rank 0 has a placeholder for y, and rank 1 for x
            optimizer.zero_grad()
            schedule.step(batch["x"], target=batch["y"], losses=(of_step := []))
            optimizer.step()
            losses += [loss.item() for loss in of_step]
            step += 1
            if step == args.stop_after:
                break
        if state is not None:
            job = {"part": part.state_dict(), "optimizer": optimizer.state_dict()}
            job |= {"loader": loader.state_dict(), "epoch": epoch, "step": step}
            torch.save(job, state)
        epoch += 1
    report(rank, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
