# SPDX-License-Identifier: Apache-2.0
"""Ray Train whose ranks read from a pool on the CPU nodes of the same Ray cluster.

The CPU nodes are started with `ray start --resources '{"dataworker": 16}'`. On the head node:

penstock up --engine ray --resource dataworker=1 --max 64 --bind tcp://HEAD:7000 --keys keys
PENSTOCK_POOL=tcp://HEAD:7000 PENSTOCK_KEYS=keys python examples/ray_train.py --ranks 8 --gpus

Ray restarts the ranks from the last checkpoint if one is lost. The checkpoint has the loader's
state, so no sample is trained on twice, also with another number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn

from penstock import DataLoader, Pool, Ranks

GLOBAL_BATCH_SIZE = 16
EPOCHS = 2
SAVE_STEPS = 8  # between checkpoints


class Photographs(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Synthetic photographs; a real dataset reads and decodes files here."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator)
        label = index % 4
        image[:, 16 * label : 16 * label + 16] //= 2
        return image, label


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 4)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images.float() / 255), labels)


def train(config: dict[str, Any]) -> None:
    """Run one rank. Ray starts it on each worker, in a process group."""
    torch.set_num_threads(1)
    device = ray.train.torch.get_device()
    loader = DataLoader(
        Photographs(),
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        # In place of ray.train.torch.prepare_data_loader().
        ranks=Ranks(global_batch_size=GLOBAL_BATCH_SIZE),
        pool=Pool(config["pool"], keys=config["keys"]),
    )
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epoch = 0
    losses: list[float] = []  # of rank 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            job = torch.load(Path(folder) / "job.pt", map_location=device)
        model.load_state_dict(job["model"])
        optimizer.load_state_dict(job["optimizer"])
        loader.load_state_dict(job["loader"])  # rank 0's, for any rank of a job of any size
        epoch, losses = job["epoch"], job["losses"]
    is_first = ray.train.get_context().get_world_rank() == 0
    while epoch < EPOCHS:
        for images, labels in loader:
            loss = loss_of(model, images.to(device), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % SAVE_STEPS:
                continue
            saved = None
            with tempfile.TemporaryDirectory() as folder:
                if is_first:
                    job = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    job |= {"loader": loader.state_dict(), "epoch": epoch, "losses": losses}
                    torch.save(job, Path(folder) / "job.pt")
                    saved = Checkpoint.from_directory(folder)
                ray.train.report({"loss": losses[-1], "losses": losses}, checkpoint=saved)
        epoch += 1
    loader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--storage", help="folder of the checkpoints, which all nodes share")
    parser.add_argument("--name", help="of the run; a run with checkpoints in --storage resumes")
    args = parser.parse_args()
    if "PENSTOCK_POOL" not in os.environ:
        parser.error("PENSTOCK_POOL must be the address of a pool; start one as described above")
    ray.init(address=args.address)
    # Ranks do not inherit this program's environment.
    keys = os.environ.get("PENSTOCK_KEYS")
    config = {"pool": os.environ["PENSTOCK_POOL"], "keys": keys and os.path.abspath(keys)}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=args.ranks, use_gpu=args.gpus),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage and os.path.abspath(args.storage),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"losses {json.dumps(result.metrics['losses'])}")


if __name__ == "__main__":
    main()
