# SPDX-License-Identifier: Apache-2.0
"""Photographs by torch's loader, by penstock with Pillow's pixels made by Pillow, and by penstock
with the same pixels made natively, with and without the changes of colours: images per second, CPU
and memory of each. Peers of bench/images_peers.py can be measured in the same rounds.

Each measurement has a fresh process, and the kinds take turns; ratios are taken within a round. All
kinds have two workers, the same dataset and an empty loop. Before a case is timed, one epoch of
each kind is compared with torch's, bit for bit, from the same seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import process_tree
import torch
from figures import (
    MeasurementError,
    Record,
    add_report_options,
    add_window_options,
    log,
    median_interval,
    report,
    summary,
)
from images_peers import PEERS
from table import aligned, by_parameter, metric_cells
from workloads import load

HERE = Path(__file__).resolve().parent
WORKER_COUNT = 2
VARIABLE = "PENSTOCK_NATIVE_IMAGES"
OURS = ("torch", "penstock, by Pillow", "penstock, colours by Pillow", "penstock")
KINDS = (*OURS, *PEERS)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SECONDS_MAX = 300.0  # of one measurement


class Case(NamedTuple):
    """A way to write the transforms, and its sizes."""

    style: str
    size: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.style}/{self.size}/{self.batch_size}"


STYLES = ("v1", "v2", "PNG", "SimCLR", "evaluation", "by hand")
CASES = {
    str(case): case
    for case in (
        *(Case(style, 224, 64) for style in STYLES),
        Case("v1", 384, 64),
        Case("v1", 224, 256),
    )
}


class ByHand(torch.utils.data.Dataset[Any]):
    """A `__getitem__` that a program has written."""

    def __init__(self, samples: list[tuple[str, int]], size: int) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        path, label = self.samples[index]
        image = Image.open(path).convert("RGB")
        side = random.randint(min(image.size) // 2, min(image.size))
        left, top = (random.randint(0, length - side) for length in image.size)
        image = image.crop((left, top, left + side, top + side))
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float().div_(255), label


def as_png(folder: Path) -> Path:
    """Return a folder with the images as PNG files, which is made once."""
    from PIL import Image

    copies = folder.with_name(f"{folder.name}-png")
    if copies.exists():
        return copies
    making = folder.with_name(f"{folder.name}-png-{os.getpid()}")
    for file in sorted(folder.glob("*/*")):
        copy = making / file.parent.name / f"{file.stem}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).convert("RGB").save(copy)
    making.rename(copies)
    return copies


def dataset_of(case: Case, folder: Path) -> Any:
    from torchvision import datasets, transforms
    from torchvision.transforms import v2

    match case.style:
        case "v1" | "PNG":
            chosen = [
                transforms.RandomResizedCrop(case.size),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
            found = as_png(folder) if case.style == "PNG" else folder
            dataset = datasets.ImageFolder(str(found), transforms.Compose(chosen))
        case "SimCLR":
            chosen = [
                transforms.RandomResizedCrop(case.size),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
                transforms.RandomGrayscale(0.2),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
            dataset = datasets.ImageFolder(str(folder), transforms.Compose(chosen))
        case "evaluation":
            chosen = [
                transforms.Resize(case.size * 8 // 7),
                transforms.CenterCrop(case.size),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
            dataset = datasets.ImageFolder(str(folder), transforms.Compose(chosen))
        case "v2":
            chosen = [
                v2.RandomResizedCrop(case.size),
                v2.RandomHorizontalFlip(),
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
            dataset = datasets.ImageFolder(str(folder), v2.Compose(chosen))
        case _:
            dataset = ByHand(datasets.ImageFolder(str(folder)).samples, case.size)
    return dataset


def make_loader(kind: str, case: Case, folder: Path) -> Any:
    arguments: dict[str, Any] = {
        "dataset": dataset_of(case, folder),
        "batch_size": case.batch_size,
        "shuffle": True,
        "drop_last": True,
        "num_workers": WORKER_COUNT,
        "persistent_workers": True,
    }
    if kind == "torch":
        return torch.utils.data.DataLoader(**arguments)
    os.environ["PENSTOCK_FALLBACK"] = "error"
    os.environ[VARIABLE] = "0" if kind == "penstock, by Pillow" else "1"
    from penstock import DataLoader

    if kind == "penstock, colours by Pillow":
        arguments["worker_init_fn"] = leave_colours_to_pillow
    return DataLoader(**arguments)


def leave_colours_to_pillow(_: int) -> None:
    """Make crops, resizes and flips natively in this worker, and no changes of colours."""
    from penstock.images import lazy_images
    from penstock.images.native_images import NativeImages

    started = lazy_images.start()
    if not isinstance(started, NativeImages):
        raise RuntimeError(f"this process must have native images, got: {started}")
    started.tested_steps = frozenset()


def digest(kind: str, case: Case, folder: Path) -> dict[str, str]:
    """The digest of an epoch."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    digest = hashlib.sha256()
    for images, labels in make_loader(kind, case, folder):
        digest.update(images.numpy().tobytes())
        digest.update(labels.numpy().tobytes())
    return {"digest": digest.hexdigest()}


def rate(kind: str, case: Case, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Images per second of an empty loop over epoch after epoch, and their cost."""
    if kind in PEERS:
        sys.path.extend(map(str, args.peers))
        dataset = dataset_of(case, folder)
        samples = dataset.samples
        batches = PEERS[kind](dataset, samples, case.size, case.batch_size, WORKER_COUNT)
    else:
        batches = _endless(make_loader(kind, case, folder))
    warm = time.perf_counter() + args.warmup
    while time.perf_counter() < warm:
        next(batches)
    busy_s, used = process_tree.machine_busy_s(), process_tree.usage(os.getpid())
    begin = now = time.perf_counter()
    image_count = 0
    while now < begin + args.seconds:
        next(batches)
        image_count += case.batch_size
        now = time.perf_counter()
    used = process_tree.usage(os.getpid()) - used
    busy_s = process_tree.machine_busy_s() - busy_s
    return {
        "images_per_s": image_count / (now - begin),
        "cpu_s_per_image": used.cpu_s / image_count,
        "pss_bytes": process_tree.pss_bytes(os.getpid()),
        "memory_bytes": process_tree.memory_bytes(os.getpid()),
        "foreign_cores": max(0.0, busy_s - used.cpu_s) / (now - begin),
    }


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _in_process(question: str, kind: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--ask", question, kind, str(case)]
    command += ["--data", str(args.data), "--seconds", str(args.seconds)]
    command += ["--warmup", str(args.warmup), *(["--quick"] if args.quick else [])]
    command += ["--peers", *map(str, args.peers)] if args.peers else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"{case} {kind} took over {SECONDS_MAX:.0f} s") from error
    if done.returncode != 0:
        raise MeasurementError(f"{case} {kind} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure_case(case: Case, args: argparse.Namespace) -> Iterator[Record]:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in args.kinds}
    for kind in [kind for kind in args.kinds if kind in OURS]:
        log(f"{case}: the pixels of {kind}")
        digest = _in_process("digest", kind, case, args)["digest"]
        if kind == args.kinds[0]:
            expected = digest
        elif digest != expected:
            raise MeasurementError(f"{case}: the batches of {kind} are not torch's; not timed")
    for index in range(args.rounds):
        log(f"{case}: round {index + 1} of {args.rounds}")
        for kind in args.kinds[:: -1 if index % 2 else 1]:
            found[kind].append(_in_process("rate", kind, case, args))
    parameters = {
        **case._asdict(),
        "case": str(case),
        "workers": WORKER_COUNT,
        "seconds": args.seconds,
        "warmup": args.warmup,
    }
    for kind, windows in found.items():
        for metric in windows[0]:
            values = [window[metric] for window in windows]
            yield summary(f"images/{metric}", {**parameters, "kind": kind}, values, ndigits=9)
        if kind != "torch":
            pairs = zip(windows, found["torch"], strict=True)
            ratios = [ours["images_per_s"] / theirs["images_per_s"] for ours, theirs in pairs]
            of_kind = {**parameters, "kind": kind, "over": "torch"}
            yield summary("images/ratio", of_kind, ratios) | {"interval": median_interval(ratios)}


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    load("photographs").folder(args.data, args.quick)
    for name in args.only:
        yield from measure_case(CASES[name], args)


COLUMNS = (
    ("images_per_s", "images/s", 1.0, "{:.0f}"),
    ("cpu_s_per_image", "CPU ms an image", 1e3, "{:.2f}"),
    ("pss_bytes", "PSS, MiB", 2**-20, "{:.0f}"),
    ("memory_bytes", "memory, MiB", 2**-20, "{:.0f}"),
)


def table(everything: list[Record]) -> str:
    rows = [["style/size/batch", "loader", "of torch's", *(title for _, title, _, _ in COLUMNS)]]
    for case in dict.fromkeys(record["parameters"]["case"] for record in everything):
        of_case = [record for record in everything if record["parameters"]["case"] == case]
        for kind, found in by_parameter(of_case, "kind").items():
            share = ""
            if "ratio" in found:
                low, high = found["ratio"]["interval"]
                share = f"{found['ratio']['median']:.2f} ({low:.2f}..{high:.2f})"
            rows.append([case, kind, share, *metric_cells(found, COLUMNS)])
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_report_options(parser)
    add_window_options(parser, rounds=5, seconds=6.0, warmup=3.0)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(OURS))
    parser.add_argument("--peers", nargs="+", default=[], help="folders with the peers' packages")
    parser.add_argument("--data", type=Path, default=HERE / "out", help="folder for data")
    parser.add_argument("--quick", action="store_true", help="few files, for a smoke test")
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)  # of a measurement's process
    args = parser.parse_args()
    if args.ask is None:
        return 1 if report("images.py", args, measure_all, table) is None else 0
    question, kind, name = args.ask
    torch.set_num_threads(1)
    folder = load("photographs").folder(args.data, args.quick)
    case = CASES[name]
    answer = digest(kind, case, folder) if question == "digest" else rate(kind, case, folder, args)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
