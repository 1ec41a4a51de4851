# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer: it makes loaders with the class that it imported from torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import penstock
from penstock.trainer_state import _SkipOnce

pytestmark = pytest.mark.slow


class Sentences(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Drawn in the worker: a wrong seed is a wrong loss.
        return {"input_ids": torch.randint(0, 50, (3 + index % 4,)), "label": index % 2}


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def train() -> tuple[Any, Any]:
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    arguments = TrainingArguments(
        output_dir=str(Path.cwd()),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        dataloader_num_workers=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=4,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        data_collator=pad,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
    )
    trainer.train()
    names = ("loss", "eval_loss")
    losses = [
        (name, log[name]) for log in trainer.state.log_history for name in names if name in log
    ]
    assert [name for name, _ in losses] == 2 * (6 * ["loss"] + ["eval_loss"])
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    return (losses, weights), trainer.callback_handler.train_dataloader.base_dataloader


def test_trainer_losses_and_weights_match_torch(
    same_as_torch: Callable[..., Any], assert_used: Callable[[Any], None]
) -> None:
    assert_used(same_as_torch(train))


def test_loader_of_torch_is_rejected_when_training_starts(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=1)
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=Sentences())
    penstock.checkpoint_loader(trainer)
    with pytest.raises(TypeError, match=r"must be penstock's, got torch\.utils\.data\.dataloader"):
        trainer.train()


def test_object_that_is_no_trainer_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"must be a transformers\.Trainer, got Linear"):
        penstock.checkpoint_loader(torch.nn.Linear(1, 1))


def test_state_of_another_batch_is_rejected() -> None:
    skip = _SkipOnce(lambda *_: "skipped")
    loader = penstock.DataLoader(Sentences(), 4, collate_fn=pad)
    assert skip(loader, 3) == "skipped"
    for place, _ in enumerate(loader):
        if place == 1:
            break
    again = penstock.DataLoader(Sentences(), 4, collate_fn=pad)
    again.load_state_dict(loader.state_dict())
    assert skip(again, 2) is again
    with pytest.raises(ValueError, match="from batch 3 of the epoch, .* got batch 2; load"):
        skip(again, 3)
