# SPDX-License-Identifier: Apache-2.0
"""The cost of the look by which a worker sees whether its dataset has changed, at the end of an
epoch.

Each dataset has a separate forked process, as a worker has: the first look finds cold caches. A
worker allows a look one batch's time, from 5 to 250 ms, and *estimate* is the time that it expects.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import MeasurementError, Record, bench_parser, report, summary
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import FakeData

from penstock.worker.fingerprint import Fingerprint, fingerprint

ENDLESS_S = 1e6


def augmented() -> Any:
    crop = transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()])
    return FakeData(20, (3, 16, 16), transform=crop)


def mapped(scale: float, folder: Path) -> Any:
    np.save(folder / "rows.npy", np.zeros(int(scale * 25_000_000)))
    return np.load(folder / "rows.npy", mmap_mode="r")


def samples(scale: float) -> list[tuple[str, int]]:
    count = int(scale * 1_280_000)
    return [(f"/data/train/{i % 1000:04d}/{i:08d}.JPEG", i % 1000) for i in range(count)]


def datasets(scale: float, folder: Path) -> dict[str, Callable[[], Any]]:
    count = int(scale * 1_000_000)
    return {
        "transforms": augmented,
        "map of 200 MB": lambda: mapped(scale, folder),
        "array of 150 MB": lambda: np.ones(int(scale * 150_000_000), np.uint8),
        "tensor of 150 MB": lambda: torch.ones(int(scale * 150_000_000), dtype=torch.uint8),
        "1.28 M of (name, label)": lambda: samples(scale),
        "1 M numbers": lambda: list(range(count)),
        "50,000 tensors": lambda: [torch.zeros(100) for _ in range(count // 20)],
        "10,000 paths": lambda: [Path(f"/data/{index}.jpeg") for index in range(count // 100)],
    }


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    context = multiprocessing.get_context("fork")
    for case, make in datasets(args.scale, args.data).items():
        dataset = make()
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_measure, args=(dataset, args.rounds, sender))
        process.start()
        sender.close()
        try:
            measured: dict[str, list[float]] = receiver.recv()
        except EOFError as error:
            raise MeasurementError(f"the process that inspects {case} died") from error
        process.join()
        for metric, values in measured.items():
            yield summary(f"dataset_look/{metric}", {"case": case}, values)


def _measure(dataset: Any, rounds: int, sender: Any) -> None:
    times = []
    for _ in range(rounds + 1):
        began_at = time.perf_counter()
        looked = fingerprint(dataset, default_collate, cost_s_max=ENDLESS_S)
        times.append(1e3 * (time.perf_counter() - began_at))
        assert isinstance(looked, Fingerprint)
    estimate_s = _least_allowed(lambda allowed_s: _can_fingerprint(dataset, allowed_s))
    sender.send({"first_ms": times[:1], "again_ms": times[1:], "estimate_ms": [1e3 * estimate_s]})


def _can_fingerprint(dataset: Any, allowed_s: float) -> bool:
    return fingerprint(dataset, default_collate, cost_s_max=allowed_s) is not None


def _least_allowed(is_enough: Callable[[float], bool]) -> float:
    """To a tenth."""
    allowed_s = 1e-5
    while not is_enough(allowed_s):
        allowed_s *= 1.1
    return allowed_s


def table(records: list[Record]) -> str:
    lines = ["| dataset | first look, ms | again, ms | estimate, ms |", "| --- | --- | --- | --- |"]
    cases = dict.fromkeys(record["parameters"]["case"] for record in records)
    for case in cases:
        of_case = [record for record in records if record["parameters"]["case"] == case]
        medians = {r["name"].rpartition("/")[2]: r["median"] for r in of_case}
        figures = [f"{medians[name]:.3g}" for name in ("first_ms", "again_ms", "estimate_ms")]
        lines.append(f"| {case} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--scale", type=float, default=1.0, help="size factor of the datasets")
    add("--data", type=Path, default=Path("bench/out"), help="folder of the data")
    add("--quick", action="store_true", help="smoke test: one round of small datasets")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.scale = 1, 0.01
    args.data.mkdir(parents=True, exist_ok=True)
    return 2 if report("dataset_look", args, measure_all, table) is None else 0


if __name__ == "__main__":
    sys.exit(main())
