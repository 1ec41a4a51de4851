# SPDX-License-Identifier: Apache-2.0
"""Frameworks that move batches to a device: with a cut, the losses of their trainers are
bit-for-bit identical, and a program's computations before the framework or in its model move.

The frameworks are the real ones. The device is the simulated GPU of tests/simgpu, which is set in
each framework's usual way; tests with several processes use gloo and the CPU.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_process import on_simgpu
from device_styles import BATCH, SAMPLES, Images, image_model
from offload_training import with_own_code
from torch import nn

import penstock

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DEVICE = "simgpu:0"
Outcome = tuple[list[float], set[str]]  # losses, and the operators that moved


@contextmanager
def installed(way: str) -> Iterator[None]:
    """Torch's name refers to our loader, unless the way is "torch"."""
    if way != "torch":
        penstock.install()
    try:
        yield
    finally:
        penstock.uninstall()


def fresh(make_model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return with_own_code(make_model())


def make_loader(**options: Any) -> Any:
    return torch.utils.data.DataLoader(
        Images(), batch_size=BATCH, shuffle=True, num_workers=2, **options
    )


def offloaded(model: Any, way: str, loader: Any) -> Any:
    return model if way == "torch" else penstock.offload(model, loader, cut=way)  # type: ignore[arg-type]


def trained(model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], Any]) -> list[float]:
    """The losses of two epochs of a loop to which the framework gives batches on the device."""
    torch.manual_seed(6)
    losses = []
    for _ in range(2):
        for images, labels in loader:
            assert images.device == torch.device(DEVICE)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


def moved_by(loader: Any) -> set[str]:
    plan = getattr(loader, "plan", None)
    assert plan is None or plan.refused is None, plan.refused
    return {call.partition(" at ")[0] for call in plan.moved_calls} if plan else set()


# ---- Lightning


def strategy_of(package: str) -> Any:
    """Of `lightning.pytorch` or `lightning.fabric`, for the device."""
    accelerators = importlib.import_module(f"{package}.accelerators")
    strategies = importlib.import_module(f"{package}.strategies")

    class Simulated(accelerators.Accelerator):  # type: ignore[misc, name-defined]
        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device.index)

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device("simgpu", index) for index in range(devices)]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "simgpu"

    return strategies.SingleDeviceStrategy(torch.device(DEVICE), Simulated())


def with_lightning(way: str) -> Outcome:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = fresh(image_model)
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, labels = batch
            assert images.device == torch.device(DEVICE)
            loss = F.cross_entropy(self.model(images), labels)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    with installed(way):
        module, loader = Module(), make_loader()
        module.model = offloaded(module.model, way, loader)
        trainer = Trainer(
            max_epochs=2,
            strategy=strategy_of("lightning.pytorch"),
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(6)
        trainer.fit(module, train_dataloaders=loader)
        return module.losses, moved_by(loader)


def with_fabric(way: str) -> Outcome:
    from lightning.fabric import Fabric

    with installed(way):
        fabric = Fabric(strategy=strategy_of("lightning.fabric"), devices=1)
        model = fresh(image_model)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        loader = fabric.setup_dataloaders(make_loader())
        model = offloaded(model, way, loader)
        losses = trained(model, optimizer, loader, fabric.backward)
        return losses, moved_by(loader._dataloader)


# ---- accelerate, and the Trainer that is based on it


@contextmanager
def accelerated() -> Iterator[None]:
    """accelerate keeps its state in the process, and reads its device from the environment."""
    from accelerate.state import AcceleratorState, GradientState

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def with_accelerate(way: str) -> Outcome:
    from accelerate import Accelerator

    with installed(way), accelerated():
        accelerator = Accelerator()
        model = fresh(image_model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
        model = offloaded(model, way, loader)
        losses = trained(model, optimizer, loader, accelerator.backward)
        return losses, moved_by(loader)


def as_pixels(samples: list[Any]) -> dict[str, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = fresh(image_model)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.net(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def with_transformers_trainer(way: str) -> Outcome:
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            self.loader = super().get_train_dataloader()
            offloaded(self.model, way, self.loader)
            return self.loader

    with installed(way), accelerated(), tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            dataloader_num_workers=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=4,
        )
        assert arguments.device == torch.device(DEVICE)
        trainer = Trainer(Classifier(), arguments, data_collator=as_pixels, train_dataset=Images())
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return losses, moved_by(trainer.loader)


# ---- Torch's wrappers around models that several processes train


@contextmanager
def process_group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def device_process_group() -> Iterator[None]:
    """No backend knows the device. This one is of a single process, for which collectives are
    no-ops."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backends = "cpu:fake,simgpu:fake"
    dist.init_process_group(backends, store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Halves(nn.Module):
    """Computes in the type that the wrapper has cast its parameters and its input to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.conv((images - 0.45) * 2)).mean((2, 3))
        return self.head(features)


def wrapped_training(
    way: str,
    wrap: Callable[[nn.Module], nn.Module],
    group: Callable[[], AbstractContextManager[None]] = process_group,
    device: str = "cpu",
) -> Outcome:
    """Of a wrapped model, with preparations in front of the wrapper and in it."""
    with group(), installed(way):
        model: Any = wrap(fresh(Halves).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = make_loader()
        model = offloaded(model, way, loader)
        torch.manual_seed(6)
        losses = []
        for _ in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                logits = model(images.flip(3).float() * 0.01)
                assert logits.device == torch.device(device)
                loss = F.cross_entropy(logits, labels.to(device))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, moved_by(loader)


def with_ddp(way: str) -> Outcome:
    return wrapped_training(way, nn.parallel.DistributedDataParallel)


def with_ddp_on_the_device(way: str) -> Outcome:
    """Whose forward moves its inputs there, on a separate stream."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        wrapped.require_backward_grad_sync = False  # as no_sync() does: there is only one rank
        return wrapped

    return wrapped_training(way, wrap, device_process_group, DEVICE)


def with_fsdp(way: str) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def wrap(model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        mesh = init_device_mesh("cpu", (1,))
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    return wrapped_training(way, wrap)


AFTER_COPY = {"_to_copy", "float", "truediv", "sub"}


@pytest.mark.parametrize("cut", [pytest.param("auto", marks=pytest.mark.long), "maximal"])
@pytest.mark.parametrize(
    ("train", "moved", "package"),
    [
        (with_lightning, AFTER_COPY, "lightning"),
        (with_fabric, AFTER_COPY, "lightning"),
        (with_accelerate, AFTER_COPY, "accelerate"),
        (with_transformers_trainer, AFTER_COPY, "transformers"),
        (with_ddp, {"flip"}, "torch"),
        (with_ddp_on_the_device, {"flip", "_to_copy", "sub"}, "torch"),
        (with_fsdp, {"flip"}, "torch"),
    ],
)
@on_simgpu
def test_framework_losses_match_torch_loader(
    train: Callable[[str], Outcome], moved: set[str], package: str, cut: str
) -> None:
    pytest.importorskip(package)
    expected, _ = train("torch")
    assert len(expected) == 2 * SAMPLES // BATCH
    losses, found = train(cut)
    assert losses == expected
    if cut == "maximal":
        assert moved <= found, found
