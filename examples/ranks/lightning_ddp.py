# SPDX-License-Identifier: Apache-2.0
"""Lightning starts the ranks itself; its mid-epoch checkpoints contain the loader's state.

python examples/ranks/lightning_ddp.py --checkpoints job --stop-after 4
python examples/ranks/lightning_ddp.py --checkpoints job
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from task import EPOCHS, loss_of, make_loader, make_model, make_optimizer, report


class Points(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        return make_loader()  # in this hook, since the ranks have met by now

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, help="folder; go on from its last.ckpt")
    parser.add_argument("--stop-after", type=int, default=-1, help="the number of a step")
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    args = parser.parse_args()
    saving = ModelCheckpoint(args.checkpoints, every_n_train_steps=2, save_last=True)
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=args.devices,
        use_distributed_sampler=False,  # the loader shards the samples
        max_epochs=EPOCHS,
        max_steps=args.stop_after,
        logger=False,
        enable_checkpointing=args.checkpoints is not None,
        callbacks=[saving] if args.checkpoints is not None else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Points()
    last = args.checkpoints / "last.ckpt" if args.checkpoints is not None else None
    is_there = last is not None and last.exists()
    trainer.fit(module, ckpt_path=last if is_there else None)
    report(trainer.global_rank, module.losses)


if __name__ == "__main__":
    main()
