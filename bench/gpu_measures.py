# SPDX-License-Identifier: Apache-2.0
"""The measurements of gpu_programs.py: the rates of the styles and of photographs into a ResNet-50,
and the table of operators with a CPU's bits. Each yields rows, as gpu_checks.py does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_resnet import ResNet50
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

TESTS = Path(__file__).resolve().parent.parent / "tests"
Row = dict[str, Any]
CUTS = ("auto", "maximal")
# A rate is the steady-state rate. Batches that were in flight when a plan came into force arrive
# whole, and are the most expensive of all; plans are priced again every 0.5 s at first.
SETTLE_S = {"torch": 1.0, "auto": 4.0, "maximal": 2.0}  # at least
OTHER_SETTLE_S = 1.5
SETTLE_MAX_S = 8.0
SETTLED_STEPS = 8  # on top of the ones in flight
# Rates mean nothing on a device that counts bytes. Its batches are small, and it takes this many
# steps until unused copies are no longer made ahead.
COUNTED_SIZE, COUNTED_STEPS = 8, 200
# The median of some parts, each at least this long and with at least this many steps.
PARTS, PART_S, PART_STEPS = 3, 0.4, 4


class Options(NamedTuple):
    device: str
    is_quick: bool
    workers: int
    out: Path


def prepare_device(device: str) -> None:
    """Prepares a process for trainings on the device with reproducible results."""
    sys.path[:0] = [str(TESTS / name) for name in ("zoo", "python", "simgpu", "device")]
    if device == "simgpu":
        import device_process

        device_process._begin()
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    multiprocessing.set_start_method("fork", force=True)
    torch.use_deterministic_algorithms(True, warn_only=True)


def make_loader(dataset: Any, way: str, options: Options, **own: Any) -> Any:
    own = {"num_workers": 2 if options.is_quick else options.workers, "pin_memory": True, **own}
    if way == "torch":
        own.pop("device", None)
        return torch.utils.data.DataLoader(dataset, **own)
    import penstock

    if way == "followed":
        own.setdefault("device", "auto")
    return penstock.DataLoader(dataset, **own)


def moved_by(loader: Any) -> list[str]:
    plan = getattr(loader, "plan", None)
    return sorted({call.partition(" at ")[0] for call in plan.moved_calls}) if plan else []


# ---- The table of styles: rates


class Larger(Dataset[Any]):
    """The samples of a style at realistic size, which cost nothing to make."""

    def __init__(self, dataset: Dataset[Any], is_quick: bool) -> None:
        samples = [dataset[index] for index in range(len(dataset))]  # type: ignore[arg-type]
        self.samples = samples if is_quick else [(_tiled(x), y) for x, y in samples]

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


def _tiled(x: torch.Tensor) -> torch.Tensor:
    """An image of 220 x 220, a second of sound, or a row of 240 columns."""
    return x.repeat(1, 11, 11) if x.dim() == 3 else x.repeat(40)


# Copies by other code, whose rates equal the rates of "image moved, model prepares".
SAME_AS_OTHERS = ("image on a side stream", "DDP moves")


def rates(options: Options) -> Iterator[Row]:
    from device_styles import STYLES, WAYS

    chosen = [style for style in STYLES if not style.package and style.name not in SAME_AS_OTHERS]
    for style in chosen[3:4] if options.is_quick else chosen:
        for way in WAYS:
            try:
                yield {"case": style.name, "way": way, **_rate(style, way, options)}
            except Exception as error:
                yield {"case": style.name, "way": way, "equal": False, "note": repr(error)[:300]}


def _rate(style: Any, way: str, options: Options) -> Row:
    own = {"device": options.device} if dict(style.options).get("device") else {}
    dataset = Larger(style.make_dataset(), options.is_quick)
    size = COUNTED_SIZE if options.device == "simgpu" else 128
    loader = make_loader(dataset, way, options, batch_size=4 if options.is_quick else size, **own)
    torch._dynamo.reset()
    model = style.make_model().to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    called: Any = torch.compile(model, backend=style.backend) if style.backend else model

    def loss_of(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = style.loss(called, batch, options.device)
        return loss

    if way in CUTS:
        import penstock

        if style.is_step_offloaded:
            loss_of = penstock.offload(loss_of, loader, cut=way)  # type: ignore[arg-type]
        else:
            called = penstock.offload(called, loader, cut=way)  # type: ignore[arg-type]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    row = measured(iter(loader), step, way, options)
    return row | {"moved": moved_by(loader)}


def measured(
    batches: Iterator[Any], step: Callable[[Any], None], way: str, options: Options
) -> Row:
    """Steps per second in the steady state, timed to the end of the device's work, and the bytes
    that a step copies to the device, where these are counted."""
    counted = importlib.import_module("simgpu") if options.device == "simgpu" else None
    if options.is_quick:
        _run(batches, step, 3, 0.0, options)
    elif counted is not None:
        for _ in range(COUNTED_STEPS):
            step(next(batches))
        synchronize(options)
    else:
        settle_s = SETTLE_S.get(way, OTHER_SETTLE_S)
        _run(batches, step, 2 * options.workers + SETTLED_STEPS, settle_s, options)
    if counted is not None:
        counted.reset_counts()
    parts = [_run(batches, step, PART_STEPS, PART_S, options) for _ in range(PARTS)]
    row: Row = {"steps_per_s": statistics.median(count / seconds for count, seconds in parts)}
    if counted is not None:
        row["bytes_per_step"] = counted.counts().bytes_in // sum(count for count, _ in parts)
    return row


def _run(
    batches: Iterator[Any],
    step: Callable[[Any], None],
    steps_min: int,
    seconds_min: float,
    options: Options,
) -> tuple[int, float]:
    """Steps until both are reached, or for `SETTLE_MAX_S`."""
    began, done = time.perf_counter(), 0
    while True:
        step(next(batches))
        done += 1
        if done % 4 == 0:  # the host runs ahead
            synchronize(options)
        seconds = time.perf_counter() - began
        if (done >= steps_min and seconds >= seconds_min) or seconds > SETTLE_MAX_S:
            synchronize(options)
            return done, time.perf_counter() - began


def synchronize(options: Options) -> None:
    if options.device != "cpu":
        torch.accelerator.synchronize()


# ---- The table of bits


def bits(options: Options) -> Iterator[Row]:
    """Writes the table of tests/device/measure_bits.py into the folder of the results."""
    from measure_bits import measure, own_calls, samples_of_opinfo

    if options.device == "cpu":
        yield {
            "case": "table of bits",
            "note": "left out: the CPU is the reference",
        }
        return
    if options.is_quick:
        calls = own_calls(options.device, elements=1000)
    else:
        calls = itertools.chain(own_calls(options.device), samples_of_opinfo(options.device))
    torch.use_deterministic_algorithms(False)  # programs run as they do by themselves
    meter = measure(options.device, calls)
    name = torch.get_device_module(options.device).get_device_name(0)
    cpu = torch.backends.cpu.get_cpu_capability()
    file = options.out / f"device_bits_{options.device}.txt"
    file.write_text(meter.table(f"{name} against a CPU with {cpu}, torch {torch.__version__}"))
    equal = len(set(meter.equal) - set(meter.differing))
    yield {
        "case": "table of bits",
        "note": f"{equal} forms equal, {len(meter.differing)} not; {file.name}",
    }


# ---- Photographs into a ResNet-50


class Photographs(Dataset[Any]):
    """JPEGs in memory: decoded, cropped and flipped at random; normalised here, or left as bytes.

    They are smooth noise of the size of a photograph, 500 x 375.
    """

    def __init__(self, side: int, is_normalised: bool) -> None:
        from PIL import Image

        self.side, self.is_normalised = side, is_normalised
        self.files = []
        generator = torch.Generator().manual_seed(0)
        for _ in range(32):
            noise = torch.rand(1, 3, 47, 63, generator=generator)
            pixels = F.interpolate(noise, (375, 500), mode="bicubic")[0].clamp(0, 1) * 255
            file = io.BytesIO()
            array = pixels.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(array).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        import numpy
        from PIL import Image

        photograph = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        share, top, left = torch.rand(3).tolist()
        width, height = photograph.size
        crop = (0.3 + 0.7 * share) * min(width, height)
        x, y = left * (width - crop), top * (height - crop)
        size = (self.side, self.side)
        image = photograph.resize(size, Image.Resampling.BILINEAR, (x, y, x + crop, y + crop))
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        pixels = pixels.contiguous()
        return (normalised(pixels) if self.is_normalised else pixels), index % 1000


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean = torch.tensor([0.485, 0.456, 0.406], device=images.device).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=images.device).view(3, 1, 1)
    return (images.float() / 255 - mean) / std


class Normalising(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(normalised(images))
        return scores


def photographs(options: Options) -> Iterator[Row]:
    if importlib.util.find_spec("PIL") is None:
        yield {"case": "photographs", "note": "left out: Pillow is not installed"}
        return
    torch.use_deterministic_algorithms(False)
    side, size = (64, 2) if options.is_quick else (224, 128)
    for is_normalised in (True, False):
        case = "normalised by workers" if is_normalised else "normalised by the model"
        dataset = Photographs(side, is_normalised)
        ways = ["torch", "swapped", "device=", "followed"]
        ways += ["resident"] if is_normalised else list(CUTS)
        for way in ways[:: 3 if options.is_quick else 1]:
            row = {"case": f"photographs, {case}", "way": way}
            try:
                yield row | _photographs_rate(way, dataset, size, options)
            except Exception as error:
                yield row | {"equal": False, "note": repr(error)[:300]}


def _photographs_rate(way: str, dataset: Photographs, size: int, options: Options) -> Row:
    torch._dynamo.reset()
    network, kind = _resnet50()
    model: nn.Module = network if dataset.is_normalised else Normalising(network)
    model = model.to(options.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = {"device": options.device} if way == "device=" else {}
    loader = make_loader(dataset, way, options, batch_size=size, **own)
    if way in CUTS:
        import penstock

        penstock.offload(model, loader, cut=way)  # type: ignore[arg-type]

    def step(batch: Any) -> None:
        images, labels = (x.to(options.device, non_blocking=True) for x in batch)
        images = images.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(options.device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    batches = iter(loader)
    if way == "resident":
        batches = itertools.repeat([x.to(options.device) for x in next(batches)])
    row = measured(batches, step, way, options)
    note = f"{row['steps_per_s'] * size:.0f} samples/s, {kind}"
    return row | {"moved": moved_by(loader), "note": note}


def _resnet50() -> tuple[nn.Module, str]:
    with contextlib.suppress(ImportError):
        from torchvision.models import resnet50

        return resnet50(weights=None), "torchvision's ResNet-50"
    return ResNet50(), "the ResNet-50 of bench/gpu_resnet.py"
