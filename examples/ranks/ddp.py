# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: a job that can be stopped, or killed, and resumes with other ranks.

torchrun --nproc-per-node=2 examples/ranks/ddp.py --state job.pt --stop-after 4
torchrun --nproc-per-node=4 examples/ranks/ddp.py --state job.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from task import EPOCHS, loss_of, make_loader, make_model, make_optimizer, report
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, help="file; if it is there, go on from it")
    parser.add_argument("--stop-after", type=int, help="the number of a step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = make_loader()
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    epoch, step, losses = 0, 0, []
    if args.state is not None and args.state.exists():
        job = torch.load(args.state)
        model.load_state_dict(job["model"])
        optimizer.load_state_dict(job["optimizer"])
        loader.load_state_dict(job["loader"])  # any rank's, of a job of any size
        epoch, step = job["epoch"], job["step"]
    while epoch < EPOCHS and step != args.stop_after:
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if rank == 0 and args.state is not None:
                job = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                job |= {"loader": loader.state_dict(), "epoch": epoch, "step": step}
                torch.save(job, args.state.with_suffix(".new"))
                args.state.with_suffix(".new").rename(args.state)  # a kill leaves a whole file
            if step == args.stop_after:
                break
        epoch += 1
    report(rank, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
