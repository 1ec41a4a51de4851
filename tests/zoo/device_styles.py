# SPDX-License-Identifier: Apache-2.0
"""The ways in which programs move a batch to a device and prepare it, as small trainings.

A style is a dataset, a model and a function that computes the loss of one batch; the function
decides how a batch gets to the device. `run` trains one in one of the ways of `WAYS`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_training import bits, with_own_code
from torch import nn
from torch.utils.data import Dataset

import penstock

SAMPLES = 40
BATCH = 4


@dataclass(frozen=True)
class Style:
    """One way to write a training program."""

    name: str
    make_dataset: Callable[[], Dataset[Any]]
    make_model: Callable[[], nn.Module]
    loss: Callable[[Any, Any, str], torch.Tensor]  # of the model, a batch, and the device
    moved: frozenset[str] = frozenset()  # the operators that cut="maximal" moves
    options: tuple[tuple[str, Any], ...] = ()  # of penstock's loader
    is_step_offloaded: bool = False  # the loss function instead of the model
    backend: str = ""  # the model is compiled with it
    package: str = ""  # which it needs


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 20, 20), dtype=torch.uint8, generator=generator)
        return image, index % 4


class Waves(Images):
    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        wave = torch.randint(-3000, 3000, (400,), generator=generator).to(torch.int16)
        return wave, index % 4


class Rows(Images):
    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 10**6, (6,), generator=generator), index % 4


# ---- Preparations, of one tensor on any device


def prepared_image(images: torch.Tensor) -> torch.Tensor:
    scaled = images.float() / 255
    scaled = (scaled - 0.45) / 0.225
    return F.interpolate(scaled, size=(16, 16), mode="bilinear", antialias=True)


def spectrogram(waves: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(64, device=waves.device)
    spectrum = torch.stft(waves.float() / 32768, 64, 32, window=window, return_complex=True)
    return torch.log(spectrum.abs().pow(2).clamp(min=1e-6))


def buckets(rows: torch.Tensor) -> torch.Tensor:
    return (rows * 2654435761 % 1000).clamp(max=900)


class Convolutions(nn.Module):
    """A network on images that were prepared, or that it prepares itself."""

    def __init__(self, prepare: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.prepare = prepare
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.prepare is not None:
            x = self.prepare(x)
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class MovesItsInput(Convolutions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.head.weight.device, non_blocking=True))


class Bands(nn.Module):
    def __init__(self, prepare: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.prepare = prepare
        self.conv = nn.Conv1d(33, 4, 3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.prepare is not None:
            x = self.prepare(x)
        return self.head(F.relu(self.conv(x)).mean(2))


class Embedded(nn.Module):
    def __init__(self, prepare: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.prepare = prepare
        self.embedding = nn.EmbeddingBag(1000, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.prepare is not None:
            x = self.prepare(x)
        return self.head(self.embedding(x))


def image_model() -> nn.Module:
    return Convolutions(prepared_image)


def wave_model() -> nn.Module:
    return Bands(spectrogram)


def row_model() -> nn.Module:
    return Embedded(buckets)


# ---- Loops


def after(prepare: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loop that prepares a batch on the CPU and moves it then."""

    def loss(model: Any, batch: Any, device: str) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(prepare(inputs).to(device)), labels.to(device))

    return loss


def moved(model: Any, batch: Any, device: str) -> torch.Tensor:
    inputs, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    return F.cross_entropy(model(inputs), labels)


def moved_under_autocast(model: Any, batch: Any, device: str) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        return moved(model, batch, device)


def moved_by_the_model(model: Any, batch: Any, device: str) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels.to(device))


def moved_and_prepared(model: Any, batch: Any, device: str) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(prepared_image(inputs.to(device))), labels.to(device))


def moved_by_accelerate(model: Any, batch: Any, device: str) -> torch.Tensor:
    from accelerate.utils import send_to_device

    inputs, labels = send_to_device(batch, torch.device(device), non_blocking=True)
    return F.cross_entropy(model(inputs), labels)


def moved_by_lightning(model: Any, batch: Any, device: str) -> torch.Tensor:
    from lightning.fabric.utilities import move_data_to_device

    inputs, labels = move_data_to_device(batch, torch.device(device))
    return F.cross_entropy(model(inputs), labels)


def moved_by_ddp(model: Any, batch: Any, device: str) -> torch.Tensor:
    """As DistributedDataParallel moves the inputs of its forward, on a separate stream."""
    from torch.distributed.utils import _to_kwargs

    indexed = torch.device(device, torch.get_device_module(device).current_device())
    (args, *_), _ = _to_kwargs(tuple(batch), {}, indexed, True)
    inputs, labels = args
    return F.cross_entropy(model(inputs), labels)


def moved_on_a_side_stream(model: Any, batch: Any, device: str) -> torch.Tensor:
    """As the prefetchers do that are often copied from other projects."""
    module = torch.get_device_module(device)
    side = module.Stream()
    with module.stream(side):
        inputs, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    module.current_stream().wait_stream(side)
    for tensor in (inputs, labels):
        tensor.record_stream(module.current_stream())
    return F.cross_entropy(model(inputs), labels)


# The operations that cut="maximal" moves. After the copy these are operations that the CPU computes
# as a GPU does: no antialiased resize, no Fourier transform.
IMAGE_BEFORE = frozenset({"_to_copy", "div", "sub", "_upsample_bilinear2d_aa"})
IMAGE_AFTER = frozenset({"float", "truediv", "sub"})
WAVE_BEFORE = frozenset(
    """_fft_r2c _to_copy abs as_strided clamp div log mul pow reflection_pad1d transpose
    view""".split()
)
ROW_BEFORE = frozenset({"_to_copy", "mul", "remainder", "clamp"})
ROW_AFTER = frozenset({"mul", "mod", "clamp"})
COPY = frozenset({"_to_copy"})

STYLES = [
    Style("image prepared in the loop", Images, Convolutions, after(prepared_image), IMAGE_BEFORE),
    Style("wave prepared in the loop", Waves, Bands, after(spectrogram), WAVE_BEFORE),
    Style("row prepared in the loop", Rows, Embedded, after(buckets), ROW_BEFORE),
    Style("image moved, model prepares", Images, image_model, moved, COPY | IMAGE_AFTER),
    Style("image under autocast", Images, image_model, moved_under_autocast, COPY | IMAGE_AFTER),
    Style(
        "image by device=",
        Images,
        image_model,
        moved,
        IMAGE_AFTER,
        options=(("device", True),),
    ),
    Style(
        "forward moves its input",
        Images,
        lambda: MovesItsInput(prepared_image),
        moved_by_the_model,
        IMAGE_AFTER | {"to"},
    ),
    Style(
        "step offloaded",
        Images,
        Convolutions,
        moved_and_prepared,
        IMAGE_AFTER | {"to"},
        is_step_offloaded=True,
    ),
    Style("row moved, model prepares", Rows, row_model, moved, COPY | ROW_AFTER),
    Style("wave moved, model prepares", Waves, wave_model, moved, COPY | {"float", "truediv"}),
    Style("compiled model", Images, image_model, moved, COPY | IMAGE_AFTER, backend="aot_eager"),
    Style(
        "image on a side stream", Images, image_model, moved_on_a_side_stream, COPY | IMAGE_AFTER
    ),
    Style("DDP moves", Images, image_model, moved_by_ddp, COPY | IMAGE_AFTER),
    Style(
        "accelerate moves",
        Images,
        image_model,
        moved_by_accelerate,
        COPY | IMAGE_AFTER,
        package="accelerate",
    ),
    Style(
        "Lightning moves",
        Images,
        image_model,
        moved_by_lightning,
        COPY | IMAGE_AFTER,
        package="lightning",
    ),
]


# ---- Trainings

# torch's loader; the import swapped; with device="auto"; and offloaded, with each cut.
WAYS = ("torch", "swapped", "followed", "auto", "maximal")
CODE = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]  # for pool workers


@dataclass(frozen=True)
class Combination:
    """How a style is trained: the model's mode, the workers' place, and the number of loaders."""

    mode: str = "eager"  # or "amp", "compiled"
    place: str = "local"  # or "pool"
    loader_count: int = 1  # the second one is for a validation after each epoch

    def __str__(self) -> str:
        return f"{self.mode}-{self.place}-{self.loader_count}"


PLAIN = Combination()
COMBINATIONS = [
    Combination(mode, place, loader_count)
    for mode in ("eager", "amp", "compiled")
    for place in ("local", "pool")
    for loader_count in (1, 2)
]


@dataclass(frozen=True)
class Training:
    losses: list[float]
    parameters: str  # a digest of their bits
    moved: tuple[frozenset[str], ...]  # operators, by loader
    bytes_in: int  # to the device; 0 where they are not counted
    refused: tuple[str | None, ...] = ()
    # The largest, of each call of the first loader's that moved by the tolerance.
    differences: tuple[float, ...] = ()


def run(
    name: str,
    way: str,
    device: str,
    other_bits: tuple[str, ...] = (),
    combination: Combination = PLAIN,
    pool: str = "",
    cut_tolerance: int | float | None = None,
) -> Training:
    """Trains a style. For a process that has the device (`device_process.py`).

    `pool` has the endpoint of a pool and the folder with its keys.
    """
    counted: Any = importlib.import_module("simgpu") if device.startswith("simgpu") else None
    style = next(style for style in STYLES if style.name == name)
    torch.manual_seed(11)
    model = with_own_code(style.make_model()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with (
        pytest.MonkeyPatch.context() as environment,
        counted.other_bits(*other_bits) if other_bits else contextlib.nullcontext(),
    ):
        endpoint, _, folder = pool.partition(" ")
        if folder:
            environment.setenv("XDG_RUNTIME_DIR", folder)
        train, *validation = loaders = [
            _loader(style, way, device, endpoint, is_training=place == 0)
            for place in range(combination.loader_count)
        ]
        backend = style.backend or ("aot_eager" if combination.mode == "compiled" else "")
        called: Any = torch.compile(model, backend=backend) if backend else model

        def step(batch: Any) -> torch.Tensor:
            return style.loss(called, batch, device)

        if way in ("auto", "maximal"):
            offload: Any = functools.partial(penstock.offload, cut=way, cut_tolerance=cut_tolerance)
            if style.is_step_offloaded:
                step = offload(step, *loaders)
            else:
                called = offload(called, *loaders)

        def loss_of(batch: Any) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=combination.mode == "amp"):
                return step(batch)

        torch.manual_seed(12)
        if counted:
            counted.reset_counts()
        losses = []
        for _ in range(2):
            called.train()
            for batch in train:
                optimizer.zero_grad()
                loss = loss_of(batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            called.eval()
            with torch.no_grad():
                losses += [loss_of(batch).item() for loader in validation for batch in loader]
        plans = [getattr(loader, "plan", None) for loader in loaders]
    digest = hashlib.sha256()
    for parameter in model.state_dict().values():
        digest.update(bits(parameter.cpu()))
    return Training(
        losses,
        digest.hexdigest(),
        tuple(
            frozenset(call.partition(" at ")[0] for call in (plan.moved_calls if plan else ()))
            for plan in plans
        ),
        counted.counts().bytes_in if counted else 0,
        tuple(plan.refused if plan else None for plan in plans),
        tuple(
            call.largest_difference
            for call in (plans[0].moved if plans[0] is not None else ())
            if call.largest_difference is not None
        ),
    )


def _loader(style: Style, way: str, device: str, endpoint: str, *, is_training: bool) -> Any:
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": is_training, "pin_memory": True}
    if way == "torch":
        return torch.utils.data.DataLoader(style.make_dataset(), num_workers=2, **options)
    own = dict(style.options)
    if "device" in own:
        own["device"] = device
    elif way == "followed":
        own["device"] = "auto"
    if endpoint:
        pool = penstock.Pool(endpoint, code_paths=CODE)
        own |= {"pool": pool, "seeding": "batch", "timeout": 60}
    else:
        own["num_workers"] = 2
    return penstock.DataLoader(style.make_dataset(), **options, **own)
