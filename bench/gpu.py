# SPDX-License-Identifier: Apache-2.0
"""The effects of ``device=`` and ``pin_memory=True`` on a GPU: copies against a plain pinned one,
the rate at which large batches reach the device, the widening of tensors that a pool sent
compressed against a copy on the device, a loop that the GPU bounds against batches that are on it,
and images through augmenting workers against torch's loader.

With ``--device cpu`` everything runs on the CPU, to check that it runs; the figures are meaningless
there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned, number, spread
from torch import nn
from torch.utils.data import Dataset

CASES = ("copy", "feed", "widen", "bound", "images")
HERE = Path(__file__).resolve().parent
WORKER_COUNTS = (1, 2, 4, 8, 16)
IMAGE_SIZE = 224
IMAGES = 64  # of a batch


class Ready(Dataset[torch.Tensor]):
    """Images that cost nothing to make, as in a loop that the GPU bounds."""

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self.images = torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index % 64]


class Augmented(Ready):
    """A crop, a flip and a normalisation of each image, in the worker as in many ImageNet jobs."""

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.images[index % 64]
        side = image.shape[-1]
        top, left = (int(torch.randint(0, side // 4, ())) for _ in range(2))
        image = image[:, top : top + side * 3 // 4, left : left + side * 3 // 4]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        resized = nn.functional.interpolate(
            image[None].float(), size=(side, side), mode="bilinear", antialias=True
        )
        return (resized[0] / 255 - 0.45) / 0.225


def make_loader(kind: str, args: argparse.Namespace, **options: Any) -> Any:
    pins = args.device == "cuda"
    if kind == "torch":
        return torch.utils.data.DataLoader(pin_memory=pins, persistent_workers=True, **options)
    from penstock import DataLoader

    if kind == "pinned":
        return DataLoader(pin_memory=pins, persistent_workers=True, **options)
    return DataLoader(device=args.device, persistent_workers=True, **options)


def finish_work(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def steps_per_s(
    batches: Iterator[torch.Tensor],
    step: Callable[[torch.Tensor], Any],
    args: argparse.Namespace,
) -> float:
    """Steps of a loop over batches from any source, timed to the end of the GPU's work."""
    for _ in range(args.warmup):
        step(next(batches).to(args.device, non_blocking=True))
    finish_work(args)
    begin = time.perf_counter()
    for _ in range(args.steps):
        step(next(batches).to(args.device, non_blocking=True))
    finish_work(args)
    return args.steps / (time.perf_counter() - begin)


def endless(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


# ---- A copy of a batch


def plain_copy_s(host: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Seconds of each copy from pinned memory, without any other work in flight."""
    target = torch.empty_like(host, device=args.device)
    seconds = []
    for _ in range(args.steps):
        finish_work(args)
        begin = time.perf_counter()
        target.copy_(host, non_blocking=True)
        finish_work(args)
        seconds.append(time.perf_counter() - begin)
    return seconds


def copies_s(work: Callable[[], Any], least_bytes: int) -> dict[str, list[float]]:
    """Seconds of the copies of batches to the device during `work`, as the driver times them, by
    the kind of memory that they read."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {}
    for event in profiler.events() or []:
        # A batch takes longer than 1 us for 100 KB on any bus; labels and sizes do not count.
        if event.name.startswith("Memcpy HtoD") and event.device_time > least_bytes / 1e5:
            seconds.setdefault(event.name, []).append(event.device_time / 1e6)
    return seconds


def measure_copy(args: argparse.Namespace) -> Iterator[Record]:
    """The rate of single copies: of torch from pinned memory, and of penstock from its slabs."""
    batch = torch.zeros(IMAGES, 3, args.size, args.size, dtype=torch.uint8)
    if args.device != "cuda":
        rates = [batch.nbytes / 1e9 / seconds for seconds in plain_copy_s(batch, args)]
        yield summary("gpu/copy/gb_per_s", {"kind": "plain"}, rates)
        return
    pinned = batch.pin_memory()
    target = torch.empty_like(pinned, device="cuda")

    def copy_plainly() -> None:
        for _ in range(args.steps):
            target.copy_(pinned, non_blocking=True)

    loader = make_loader(
        "penstock", args, dataset=Ready(IMAGES * args.steps, args.size), batch_size=IMAGES,
        num_workers=4,
    )  # fmt: skip
    for batch_of_loader in loader:  # the slabs are registered
        del batch_of_loader
    plain = copies_s(copy_plainly, batch.nbytes)
    ours = copies_s(lambda: [None for _ in loader], batch.nbytes)
    for kind, found in (("plain", plain), ("penstock", ours)):
        if not found:
            raise MeasurementError(
                f"the profiler saw no copy of {kind}; run as a user who may profile"
            )
        for memory, seconds in found.items():
            rates = [batch.nbytes / 1e9 / each for each in seconds]
            yield summary("gpu/copy/gb_per_s", {"kind": kind, "memory": memory}, rates)


# ---- Large batches that cost nothing to make


def measure_feed(args: argparse.Namespace) -> Iterator[Record]:
    """The rate at which batches reach the device in a loop without other work: torch's loader and
    penstock's with ``pin_memory=True`` and ``.to(device, non_blocking=True)``, and ``device=``.
    """
    dataset = Ready(IMAGES * max(args.steps, 50), args.size * 12 // 7)
    batch_bytes = dataset.images.nbytes

    def step(batch: torch.Tensor) -> torch.Tensor:
        return batch.flatten()[:1].float()

    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for count in args.workers:
            for kind in ("torch", "pinned", "device"):
                loader = make_loader(
                    kind, args, dataset=dataset, batch_size=IMAGES, num_workers=count
                )
                rate = steps_per_s(endless(loader), step, args) * batch_bytes / 1e9
                rates.setdefault((kind, count), []).append(rate)
                del loader
    for (kind, count), values in rates.items():
        yield summary("gpu/feed/gb_per_s", {"kind": kind, "workers": count}, values)
        if kind == "pinned":
            pairs = zip(values, rates["device", count], strict=True)
            shares = [pinned / copied for pinned, copied in pairs]
            yield summary("gpu/feed/pinned_over_device", {"workers": count}, shares)


# ---- Tensors that arrived compressed


def widen_program() -> Path:
    show = [sys.executable, "setup.py", "-q", "native", "--show-folder"]
    done = subprocess.run(show, cwd=HERE.parent, check=True, capture_output=True, text=True)
    return HERE.parent / done.stdout.strip() / "bench" / "gpu_widen"


def measure_widen(args: argparse.Namespace) -> Iterator[Record]:
    """Widening, and the bytes it reads and writes over the bytes of a plain copy in the same
    time."""
    rounds = min(args.steps, 50)
    command = [str(widen_program()), args.device, str(rounds), str(args.wide_bytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except OSError as error:
        raise MeasurementError(
            f"{command[0]} cannot be run: {error}; `make bench-gpu` builds it"
        ) from None
    if done.returncode == 3:  # a build without kernels, or a device that they are not for
        print(f"gpu: widen is skipped: {done.stderr.strip()}", file=sys.stderr, flush=True)
        return
    if done.returncode != 0:
        raise MeasurementError(
            f"{command[0]} exited with code {done.returncode}: {done.stderr[-1000:]}"
        )
    for line in done.stdout.splitlines():
        found = json.loads(line)
        copy_rates = [found["copy_bytes"] / 1e9 / seconds for seconds in found["copy_s"]]
        rates = [found["widen_bytes"] / 1e9 / seconds for seconds in found["widen_s"]]
        shares = [ours / copy for ours, copy in zip(rates, copy_rates, strict=True)]
        parameters = {"encoding": found["encoding"]}
        yield summary("gpu/widen/gb_per_s", parameters, rates)
        yield summary("gpu/widen/of_bandwidth", parameters, shares)


# ---- A loop that the GPU bounds


def make_heavy_step(args: argparse.Namespace) -> Callable[[torch.Tensor], Any]:
    """Work that takes the GPU far longer than the workers take for a batch."""
    weight = torch.randn(args.width, args.width, device=args.device)

    def step(batch: torch.Tensor) -> torch.Tensor:
        x = batch.flatten(1)[:, :1].float().mean() + weight
        for _ in range(args.depth):
            x = x @ weight
        return x

    return step


def measure_bound(args: argparse.Namespace) -> Iterator[Record]:
    step = make_heavy_step(args)
    dataset = Ready(IMAGES * max(args.steps, 50), args.size)
    resident = [
        torch.stack([dataset[index] for index in range(IMAGES)]).to(args.device) for _ in range(4)
    ]
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        rates.setdefault(("resident", 0), []).append(
            steps_per_s(itertools.cycle(resident), step, args)
        )
        for count in args.workers:
            for kind in ("torch", "penstock"):
                loader = make_loader(
                    kind, args, dataset=dataset, batch_size=IMAGES, num_workers=count
                )
                rate = steps_per_s(endless(loader), step, args)
                rates.setdefault((kind, count), []).append(rate)
                del loader
    for (kind, count), values in rates.items():
        yield summary("gpu/bound/steps_per_s", {"kind": kind, "workers": count}, values)
        shares = [ours / best for ours, best in zip(values, rates["resident", 0], strict=True)]
        yield summary("gpu/bound/of_resident", {"kind": kind, "workers": count}, shares)


# ---- Images through augmenting workers


def make_network(args: argparse.Namespace) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*layers, *head).to(args.device)


def measure_images(args: argparse.Namespace) -> Iterator[Record]:
    """Training on augmented images with each loader: float32, as torchvision's transforms give."""
    network = make_network(args)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    labels = torch.zeros(IMAGES, dtype=torch.long, device=args.device)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(batch), labels).backward()
        optimizer.step()

    dataset = Augmented(IMAGES * max(args.steps, 50), args.size)
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for count in args.workers:
            for kind in ("torch", "penstock"):
                loader = make_loader(
                    kind, args, dataset=dataset, batch_size=IMAGES, num_workers=count, shuffle=True
                )
                rate = steps_per_s(endless(loader), step, args)
                rates.setdefault((kind, count), []).append(rate)
                del loader
    for (kind, count), values in rates.items():
        yield summary("gpu/images/steps_per_s", {"kind": kind, "workers": count}, values)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    cases = {
        "copy": measure_copy,
        "feed": measure_feed,
        "widen": measure_widen,
        "bound": measure_bound,
        "images": measure_images,
    }
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    for name in args.only or CASES:
        print(f"gpu: {name}", file=sys.stderr, flush=True)
        for record in cases[name](args):
            yield record | {"device": where}


def table(everything: list[Record]) -> str:
    rows = [["measured", "of", "median (p10..p90)"]]
    for record in everything:
        of = ", ".join(f"{name} {value}" for name, value in record["parameters"].items())
        rows.append([f"`{record['name']}`", of, spread(record, 1.0)])
    device = everything[0].get("device", "cpu")
    return f"On {device}; {number(len(everything))} figures\n\n{aligned(rows)}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=CASES,
        help=f"one or more of: {', '.join(CASES)}",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    add("--workers", type=int, nargs="+", default=list(WORKER_COUNTS), help="numbers of workers")
    add("--rounds", type=int, default=5, help="measurements per case (default: 5)")
    add("--steps", type=int, default=200, help="timed steps (default: 200)")
    add("--quick", action="store_true", help="smoke test with few small steps")
    add_report_options(parser)
    args = parser.parse_args()
    args.size, args.width, args.depth, args.warmup = IMAGE_SIZE, 4096, 8, 20
    args.wide_bytes = 256 << 20  # more than caches hold
    if args.quick:
        args.size, args.width, args.depth, args.warmup = 16, 32, 1, 2
        args.rounds, args.steps, args.workers = 1, 4, [1]
        args.wide_bytes = 1 << 20
    if args.read is None and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch found no CUDA device; use a machine with one, or pass --device cpu")
    return args


def main() -> int:
    done = report("gpu", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
