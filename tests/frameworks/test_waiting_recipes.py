# SPDX-License-Identifier: Apache-2.0
"""The callbacks and bars of docs/how-to/tracing.md, with the real frameworks and loggers."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import linear_model, loss_of
from torch import nn
from torch.utils.data import Dataset
from written_recipes import code_of, names_of

import penstock

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGE = "tracing.md"
SHARE = "penstock/waiting_share"


class Sleeping(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.full((4,), index / len(self)), index % 2


class Rows(Sleeping):
    def __getitem__(self, index: int) -> Any:
        inputs, labels = super().__getitem__(index)
        return {"inputs": inputs, "labels": labels}


class LabelledModel(nn.Module):
    """As required by Hugging Face's Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = linear_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": loss_of(self.model, (inputs, labels))}


def scalars_in(folder: Path) -> dict[str, list[float]]:
    """The values that TensorBoard reads in the newest file below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    read = EventAccumulator(str(files[-1]))
    read.Reload()
    tags = read.Tags()["scalars"]
    return {tag: [one.value for one in read.Scalars(tag)] for tag in tags}


def wandb_scalars(folder: Path) -> dict[str, list[float]]:
    """The records that W&B wrote offline below a folder."""
    found: dict[str, list[float]] = {}
    for record in wandb_records(folder):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if "penstock/" in name:
                found.setdefault(name, []).append(float(item.value_json))
    return found


def wandb_records(folder: Path) -> list[Any]:
    """All records to the last: W&B's process may still write some after finish()."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("*.wandb")
    deadline = time.monotonic() + 20
    while True:
        contents = [*leveldb_records(file.read_bytes()[7:], 7)]
        records = [wandb_internal_pb2.Record.FromString(content) for content in contents]
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{file}: no exit in {len(records)} records"
        time.sleep(0.05)


def leveldb_records(data: bytes, at: int) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, whose first byte is at this place of the file."""
    block_bytes, header = 32768, struct.Struct("<IHB")
    parts: list[bytes] = []
    place = 0
    while place + header.size <= len(data):
        left = block_bytes - (at + place) % block_bytes
        if left < header.size:
            place += left
            continue
        _, length, kind = header.unpack_from(data, place)
        place += header.size
        parts.append(data[place : place + length])
        place += length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    import wandb

    wandb.teardown()


@pytest.fixture
def installed() -> Iterator[None]:
    penstock.install()
    yield
    penstock.uninstall()


def fit(callback: Any, **options: Any) -> Any:
    """Trains with Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = linear_model()

        def training_step(self, batch: Any) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        log_every_n_steps=5,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Tiny(), penstock.DataLoader(Sleeping(), batch_size=4, num_workers=1))
    return trainer


def test_lightning_logs_waiting_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from lightning.pytorch.loggers import TensorBoardLogger

    log = names_of(PAGE, "Lightning")["LogWaiting"]
    fit(log(), logger=TensorBoardLogger(tmp_path), enable_progress_bar=False)
    scalars = scalars_in(tmp_path)
    assert len(scalars[SHARE]) == 4 and all(0 <= value <= 1 for value in scalars[SHARE])
    assert scalars["penstock/dataset_s"][0] > 0


@pytest.mark.long
def test_lightning_logs_waiting_to_wandb(tmp_path: Path, offline: None) -> None:
    from lightning.pytorch.loggers import WandbLogger

    log = names_of(PAGE, "Lightning")["LogWaiting"]
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    fit(log(), logger=logger, enable_progress_bar=False)
    logger.experiment.finish()
    assert len(wandb_scalars(tmp_path)[SHARE]) == 4


def train_with_huggingface(tmp_path: Path, reporter: Any) -> None:
    from transformers import Trainer, TrainingArguments

    log = names_of(PAGE, "Hugging Face's Trainer")["LogWaiting"]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        report_to="none",
        logging_steps=5,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        dataloader_num_workers=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LabelledModel(), args=arguments, train_dataset=Rows(), callbacks=[log(), reporter]
    )
    trainer.train()


def test_trainer_logs_waiting_to_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    writer = SummaryWriter(str(tmp_path / "board"))
    train_with_huggingface(tmp_path, TensorBoardCallback(writer))
    writer.close()
    scalars = scalars_in(tmp_path / "board")
    (tag,) = [name for name in scalars if name.endswith(SHARE)]
    shares = scalars[tag]
    assert len(shares) >= 4 and all(0 <= share <= 1 for share in shares) and max(shares) > 0


@pytest.mark.long
def test_trainer_logs_waiting_to_wandb(tmp_path: Path, offline: None, installed: None) -> None:
    import wandb
    from transformers.integrations import WandbCallback

    train_with_huggingface(tmp_path, WandbCallback())
    wandb.finish()
    (name,) = [name for name in wandb_scalars(tmp_path) if name.endswith(SHARE)]
    assert len(wandb_scalars(tmp_path)[name]) >= 4


def test_custom_loop_logs_waiting_to_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.chdir(tmp_path)
    loader = penstock.DataLoader(Sleeping(), batch_size=1, num_workers=1)
    code = code_of(PAGE, "A loop of your own").replace("step % 50", "step % 10")
    names: dict[str, Any] = {"loader": loader, "train_step": lambda batch: None}
    exec(code, names)
    names["writer"].close()
    assert len(scalars_in(tmp_path)[SHARE]) == 4


def test_lightning_progress_bar_shows_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    bar = names_of(PAGE, "Lightning's bar")["WaitingBar"]
    fit(bar(), logger=False)
    shown = capsys.readouterr()
    assert "loader=waiting" in shown.out + shown.err
