# SPDX-License-Identifier: Apache-2.0
"""FSDP2: model, optimizer and loader in one checkpoint of DCP, for any number of ranks.

torchrun --nproc-per-node=4 examples/ranks/fsdp2.py --checkpoint step --stop-after 4
torchrun --nproc-per-node=2 examples/ranks/fsdp2.py --checkpoint step
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import EPOCHS, loss_of, make_loader, make_model, make_optimizer, report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Training:
    """Model and optimizer, as DCP's Stateful; the loader is a separate one."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="folder; if it is there, go on from it")
    parser.add_argument("--stop-after", type=int, help="the number of a step, then saved")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    loader, model = make_loader(), make_model()
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh)
    training, losses = Training(model, make_optimizer(model)), []
    job = {"training": training, "loader": loader}
    if args.checkpoint is not None and args.checkpoint.exists():
        dcp.load(job, checkpoint_id=args.checkpoint)
    while training.step < EPOCHS * len(loader) and training.step != args.stop_after:
        for batch in loader:
            loss = loss_of(model, batch)
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            losses.append(loss.item())
            training.step += 1
            if training.step == args.stop_after:
                dcp.save(job, checkpoint_id=args.checkpoint)
                break
    report(dist.get_rank(), losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
