# SPDX-License-Identifier: Apache-2.0
"""Lightning and Fabric: they rebuild a loader from its attributes to insert their sampler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import _replace_dunder_methods, _update_dataloader
from lightning.pytorch import LightningModule, Trainer
from program_runs import run_ranks
from tiny_training import Noisy, linear_model, loss_of, train_step
from torch.utils.data import DataLoader, SequentialSampler

import penstock

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


TORCHS = (DataLoader,)  # in a place that rebinding does not reach


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = linear_model()
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def make_loader() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)


def fit(module: LightningModule, **data: Any) -> Trainer:
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, **data)
    return trainer


def fit_a_loader() -> tuple[Any, Any]:
    module = Tiny()
    trainer = fit(module, train_dataloaders=make_loader())
    return module.losses, trainer.train_dataloader


class TinyWithData(Tiny):
    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader()


def fit_a_module_with_its_data() -> tuple[Any, Any]:
    module = TinyWithData()
    return module.losses, fit(module).train_dataloader


def train_with_fabric() -> tuple[Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = linear_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loader = fabric.setup_dataloaders(make_loader())
    losses = [train_step(model, optimizer, batch) for _ in range(2) for batch in loader]
    return losses, loader._dataloader


@pytest.mark.long("penstock-train_with_fabric")
@pytest.mark.parametrize("run", [fit_a_loader, fit_a_module_with_its_data, train_with_fabric])
def test_training_losses_match_torch(
    run: Callable[[], Any],
    same_as_torch: Callable[..., Any],
    assert_used: Callable[[Any], None],
) -> None:
    assert_used(same_as_torch(run))


class LabelledBefore(DataLoader[Any]):
    """A loader that Lightning can rebuild only because it saw the call that made it."""

    def __init__(self, label: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.given_label = label


def test_loader_made_in_a_hook_is_rebuilt_from_its_call(loader_name: str) -> None:
    class LabelledAfter(DataLoader[Any]):
        def __init__(self, label: str, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.given_label = label

    for kind in (LabelledBefore, LabelledAfter):
        with _replace_dunder_methods(DataLoader, "dataset"):
            loader = kind("a", Noisy(), batch_size=2)
        again = _update_dataloader(loader, SequentialSampler(range(3)))
        assert type(again) is kind and again.given_label == "a"
        assert [len(labels) for _, labels in again] == [2, 1]
    assert issubclass(LabelledAfter, penstock.DataLoader) == (loader_name == "penstock")


@pytest.mark.usefixtures("loader_name")
def test_lightning_patches_of_classes_are_undone() -> None:
    classes = (*TORCHS, penstock.DataLoader, DataLoader, LabelledBefore)
    names = ("__init__", "__setattr__", "__delattr__")
    before = [getattr(kind, name) for kind in classes for name in names]
    with _replace_dunder_methods(DataLoader, "dataset"):
        assert all(kind.__init__ not in before for kind in classes)
        assert all(kind.__setattr__ not in before for kind in (*TORCHS, DataLoader))
    assert [getattr(kind, name) for kind in classes for name in names] == before


@pytest.mark.parametrize("in_a_hook", [False, True])
@pytest.mark.usefixtures("loader_name")
def test_penstock_options_survive_loader_rebuilding(in_a_hook: bool) -> None:
    def make() -> penstock.DataLoader[Any]:
        return penstock.DataLoader(Noisy(), batch_size=2, device="cpu", num_workers=1)

    if in_a_hook:
        with _replace_dunder_methods(DataLoader, "dataset"):
            loader = make()
    else:
        loader = make()
    again = _update_dataloader(loader, SequentialSampler(range(3)))
    assert type(again) is type(loader) and again is not loader
    assert again.device == "cpu"
    assert [len(labels) for _, labels in again] == [2, 1]
    assert again.stats().iterator == "penstock"


@pytest.mark.usefixtures("loader_name")
def test_rebuilt_loader_keeps_automatic_workers() -> None:
    loader: Any = penstock.DataLoader(
        Noisy(), batch_size=2, num_workers="auto", seeding="batch", shuffle=True
    )
    again: Any = _update_dataloader(loader, SequentialSampler(range(3)))
    assert again.num_workers == loader.num_workers >= 1
    assert type(again.num_workers) is type(loader.num_workers) is not int
    assert [len(labels) for _, labels in again] == [2, 1]


RANKS = """
    import json, logging, sys, warnings
    logging.disable(logging.WARNING)
    import penstock, torch
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer, seed_everything
    from test_lightning import Tiny
    from tiny_training import Noisy, linear_model, train_step
    from torch.utils.data import DataLoader

    def make_loader(**options):
        return DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1, **options)

    def describe(losses, loader):
        return {
            "losses": losses,
            "is ours": isinstance(loader, penstock.DataLoader),
            "is torch's": isinstance(loader, DataLoader),
            "sampler": type(loader.sampler).__name__,
            "batches": len(loader),
            "device": getattr(loader, "device", None),
        }

    def fit(loader):
        torch.manual_seed(1)
        module = Tiny()
        trainer = Trainer(
            max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return describe(module.losses, trainer.train_dataloader)

    def train(loader):
        torch.manual_seed(1)
        model = linear_model()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
        prepared = fabric.setup_dataloaders(loader)
        losses = [train_step(model, optimizer, batch) for _ in range(2) for batch in prepared]
        return describe(losses, prepared._dataloader)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    report = {"torch": [fit(make_loader()), train(make_loader())]}
    penstock.install()
    report["penstock"] = [fit(make_loader(device="cpu")), train(make_loader(device="cpu"))]
    print(json.dumps(report))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_two_ranks_share_the_data_and_match_torch_losses(tmp_path: Path) -> None:
    reports = [json.loads(out.splitlines()[-1]) for out in run_ranks(RANKS, tmp_path)]
    for report in reports:
        for ours, torchs in zip(report["penstock"], report["torch"], strict=True):
            assert (torchs["is ours"], ours["is ours"]) == (False, True)
            assert (torchs["is torch's"], ours["is torch's"]) == (True, True)
            assert torchs["sampler"] == ours["sampler"] == "DistributedSampler"
            # 11 of 22 samples, in batches of 3.
            assert torchs["batches"] == ours["batches"] == 4
            assert ours["device"] == "cpu"
            assert len(torchs["losses"]) == 8
            assert ours["losses"] == torchs["losses"]
    first, second = (report["torch"][0]["losses"] for report in reports)
    assert first != second


class Seen(Tiny):
    def training_step(self, batch: Any) -> torch.Tensor:
        self.losses.append(batch[1].tolist())
        return loss_of(self.model, batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_checkpoint_within_an_epoch_resumes_there(workers: int, tmp_path: Path) -> None:
    """Torch's loader restarts the epoch, and the batches at its end are left out."""

    def fit(steps: int, checkpoint: Path | None) -> list[Any]:
        torch.manual_seed(9)
        loader: Any = penstock.DataLoader(Noisy(), 4, shuffle=True, num_workers=workers)
        trainer = Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Seen()
        trainer.fit(module, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module.losses

    expected = fit(6, None)
    assert fit(2, None) == expected[:2]
    assert fit(6, tmp_path / "2.ckpt") == expected[2:]
