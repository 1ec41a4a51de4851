# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer: our loader in place of the Trainer's, with the loader's state in each
checkpoint.

    torchrun --nproc-per-node=2 examples/ranks/hf_trainer.py --output job --stop-after 4
    torchrun --nproc-per-node=2 examples/ranks/hf_trainer.py --output job
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from task import EPOCHS, NoisyPoints, loss_of, make_loader, make_model, make_optimizer, report
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class LoaderState(TrainerCallback):
    """Saves the loader with each checkpoint. It is the same on all ranks."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(self.loader.state_dict(), folder / "loader.pt")


class PointsTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        self.loader = make_loader()
        if self.checkpoint is not None:
            self.loader.load_state_dict(torch.load(Path(self.checkpoint) / "loader.pt"))
        self.add_callback(LoaderState(self.loader))
        return self.loader

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = loss_of(model, inputs)
        self.losses.append(loss.item())
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="trainer_output", help="go on from its last checkpoint")
    parser.add_argument("--stop-after", type=int, default=-1, help="the number of a step")
    options = parser.parse_args()
    arguments = TrainingArguments(
        options.output,
        num_train_epochs=EPOCHS,
        max_steps=options.stop_after,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="steps",
        save_steps=2,
        ignore_data_skip=True,  # the loader is in the same place
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = make_model()
    optimizers = make_optimizer(model), None
    trainer = PointsTrainer(model, arguments, train_dataset=NoisyPoints(), optimizers=optimizers)
    is_there = Path(options.output).exists()
    trainer.losses, trainer.checkpoint = (
        [],
        get_last_checkpoint(options.output) if is_there else None,
    )
    trainer.train(resume_from_checkpoint=trainer.checkpoint)
    report(arguments.process_index, trainer.losses)


if __name__ == "__main__":
    main()
