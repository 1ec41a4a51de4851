# SPDX-License-Identifier: Apache-2.0
"""Frameworks resume in the middle of an epoch from the loader's state in their checkpoints, in
another process: with the same losses, and without fetching a sample again that was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program_runs import PYTHON, run_program

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Each sample that a program's workers fetch is a line of the file `fetched`.
START = """
    import json, os, sys
    import penstock, torch
    from tiny_training import Noisy, linear_model, loss_of
    from torch.utils.data import DataLoader, IterableDataset

    STOP_AFTER = int(sys.argv[1]) or None
    RESUMES, KIND, WORKERS = sys.argv[2] == "resume", sys.argv[3], int(sys.argv[4])

    def note(index):
        with open("fetched", "a") as file:
            file.write(f"{index}\\n")

    class Noted(Noisy):
        def __getitem__(self, index):
            note(index)
            return super().__getitem__(index)

    class Stream(IterableDataset):
        at = 0

        def __len__(self):  # without it, Lightning reads one batch ahead of its checkpoints
            return 22

        def __iter__(self):
            at, self.at = self.at, 0
            for self.at in range(at + 1, 23):
                note(self.at - 1)
                yield Noisy()[self.at - 1]
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def make_loader(kind=DataLoader, **options):
        if KIND == "map":
            options["shuffle"] = True
        data = Noted() if KIND == "map" else Stream()
        return kind(data, batch_size=4, num_workers=WORKERS, **options)

    torch.manual_seed(8)
"""

ACCELERATE = """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    penstock.install(seeding="batch")
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    model = linear_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.5), make_loader()
    )
    assert isinstance(loader.base_dataloader, penstock.DataLoader)
    step, losses = 0, []
    if RESUMES:
        accelerator.load_state("saved")
        step = accelerator.step
    while step < 12 and step != STOP_AFTER:
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == STOP_AFTER:
                accelerator.step = step
                accelerator.save_state("saved")
                break
    print(json.dumps(losses))
"""

LIGHTNING = """
    import logging
    logging.disable(logging.WARNING)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Tiny(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = linear_model(), []

        def training_step(self, batch):
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    saving = ModelCheckpoint(".", filename="saved", every_n_train_steps=STOP_AFTER)
    trainer = Trainer(
        max_epochs=2, max_steps=STOP_AFTER or -1, accelerator="cpu", logger=False,
        enable_checkpointing=bool(STOP_AFTER), enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving] if STOP_AFTER else [],
    )
    module = Tiny()
    # Lightning does not restore the global generator, from which the second epoch would be drawn.
    generator = torch.Generator().manual_seed(5)
    loader = make_loader(penstock.DataLoader, seeding="batch", generator=generator)
    loader.state_dict()  # snapshots from the first batch on, not from the first checkpoint
    trainer.fit(module, loader, ckpt_path="saved.ckpt" if RESUMES else None)
    print(json.dumps(module.losses))
"""

TRAINER = """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    penstock.install(seeding="batch")

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.dropout = linear_model(), torch.nn.Dropout(0.2)

        def forward(self, batch):
            loss = loss_of(torch.nn.Sequential(self.model, self.dropout), batch)
            losses.append(loss.item())
            return {"loss": loss}

    def collate(samples):
        return {"batch": torch.utils.data.default_collate(samples)}

    losses = []
    arguments = TrainingArguments(
        "saved", num_train_epochs=2, max_steps=12, per_device_train_batch_size=4,
        dataloader_num_workers=WORKERS, save_strategy="steps" if STOP_AFTER else "no",
        save_steps=STOP_AFTER or 1, lr_scheduler_type="constant", remove_unused_columns=False,
        report_to=[], use_cpu=True, disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},
    )
    data = Noted() if KIND == "map" else Stream()
    trainer = Trainer(Tiny(), arguments, data_collator=collate, train_dataset=data)
    penstock.checkpoint_loader(trainer)
    if STOP_AFTER:
        class Stop(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                print(json.dumps(losses), flush=True)
                os._exit(0)
        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=RESUMES)
    print(json.dumps(losses))
"""

SAMPLES, STEPS, STEPS_OF_EPOCH = 22, 12, 6


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers", "stop_after"), [("map", 2, 8), ("map", 0, 2), ("stream", 1, 2)]
)
@pytest.mark.parametrize(
    "program", [ACCELERATE, LIGHTNING, TRAINER], ids=["accelerate", "lightning", "trainer"]
)
def test_resumed_run_continues_within_the_epoch(
    program: str, kind: str, workers: int, stop_after: int, tmp_path: Path
) -> None:
    def run(*arguments: Any) -> tuple[list[float], list[int]]:
        (tmp_path / "fetched").write_text("")
        given = [*map(str, arguments), kind, str(workers)]
        out = run_program(PYTHON, START + program, tmp_path, *given)
        fetched = (tmp_path / "fetched").read_text().split()
        return json.loads(out.splitlines()[-1]), sorted(map(int, fetched))

    expected, fetched = run(0, "start")
    assert len(expected) == STEPS and fetched == sorted(2 * [*range(SAMPLES)])
    assert run(stop_after, "start")[0] == expected[:stop_after]
    losses, fetched = run(0, "resume")
    assert losses == expected[stop_after:]
    # Each epoch ends with a batch of 2.
    epochs_done, steps = divmod(stop_after, STEPS_OF_EPOCH)
    assert len(fetched) == (2 - epochs_done) * SAMPLES - 4 * steps
