# SPDX-License-Identifier: Apache-2.0
"""The cost of a loader's states: none taken, and one taken before each batch.

Torch's loader takes none, and torchdata's StatefulDataLoader keeps them from the start. The rounds
of the loaders take turns, each with a fresh loader of one epoch.

- order: a sampler of 20,000 whose state holds its permutation, in batches of 20 tensors.
- numbers: the same, in batches of 20 numbers, which torch's loader makes in 16 us each.
- ahead: the same, with two workers.
- mixture: a MixtureSampler of 100 sources; memory is the trainer's growth from the hundredth batch
  of the epoch to the last one.
- module: a map-style dataset that is an nn.Module with 16 MB of weights, with two workers.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from figures import Record, add_report_options, report, run_main, summary
from table import aligned, number
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock

LOADERS: dict[str, Any] = {
    "torch": torch.utils.data.DataLoader,
    "torchdata": StatefulDataLoader,
    "penstock": penstock.DataLoader,
    "torchdata, a state each batch": StatefulDataLoader,
    "penstock, a state each batch": penstock.DataLoader,
}


class KeptOrder(Sampler[int]):
    """Keeps its permutation, and its place in it."""

    def __init__(self, count: int) -> None:
        self.order = torch.randperm(count).tolist()
        self.place = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        for index in self.order[self.place :]:
            self.place += 1
            yield index
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


class Indices(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Rows(Indices):
    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor([index])


class Weighted(torch.nn.Module):
    """A dataset with 16 MB of weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.table = torch.nn.Parameter(torch.zeros(4 << 20), requires_grad=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index]


def case(name: str, batch_count: int) -> dict[str, Any]:
    """The arguments of a loader."""
    if name in ("order", "numbers", "ahead"):
        count = 20 * batch_count
        dataset = Indices(count) if name == "numbers" else Rows(count)
        options = {"num_workers": 2} if name == "ahead" else {}
        return {"dataset": dataset, "batch_size": 20, "sampler": KeptOrder(count), **options}
    if name == "mixture":
        sampler = penstock.MixtureSampler(
            [1000] * 100, [1.0] * 100, when_exhausted="repeat", num_samples=8 * batch_count
        )
        return {"dataset": Indices(100_000), "batch_size": 8, "sampler": sampler}
    return {"dataset": Weighted(4 * batch_count), "batch_size": 4, "num_workers": 2}


def epoch(loader: Any, asks: bool) -> tuple[float, float]:
    """Seconds of an epoch without the start of its workers, and the MB that it left."""
    if asks:
        loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    began_at = time.perf_counter()
    resident = 0
    for count, _ in enumerate(iterator):
        if asks:
            loader.state_dict()
        if count == 100:
            resident = resident_bytes()
    seconds = time.perf_counter() - began_at
    return seconds, (resident_bytes() - resident) / 1e6 if resident else 0.0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(args: argparse.Namespace) -> Iterator[Record]:
    for name, batch_count in (
        ("order", args.batches),
        ("numbers", args.batches),
        ("ahead", args.batches),
        ("mixture", args.mixture_batches),
        ("module", args.module_batches),
    ):
        times: dict[str, list[float]] = {loader: [] for loader in LOADERS}
        growth: dict[str, list[float]] = {loader: [] for loader in LOADERS}
        for _ in range(args.rounds):
            for loader_name, loader_class in LOADERS.items():
                gc.collect()
                loader = loader_class(**case(name, batch_count))
                seconds, grown = epoch(loader, "state" in loader_name)
                times[loader_name].append(seconds)
                growth[loader_name].append(grown)
        for loader_name in LOADERS:
            parameters = {"case": name, "loader": loader_name, "batches": batch_count}
            yield summary("states/seconds", parameters, times[loader_name])
            yield summary("states/grown_mb", parameters, growth[loader_name])


def table(everything: list[Record]) -> str:
    rows = [["case", "batches", "loader", "s", "ratio to torch", "growth, MB"]]
    found = {(r["name"], r["parameters"]["case"], r["parameters"]["loader"]): r for r in everything}
    for (what, name, loader), record in found.items():
        if what != "states/seconds":
            continue
        seconds = record["median"]
        of_torch = found[what, name, "torch"]["median"]
        grown = found["states/grown_mb", name, loader]["median"]
        batches = number(record["parameters"]["batches"])
        cells = [f"{seconds:.3f}", f"{seconds / of_torch:.2f}", f"{grown:.1f}"]
        rows.append([name, batches, loader, *cells])
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batches", type=int, default=1000, help="batches of the kept order (default: 1000)")
    add(
        "--mixture-batches",
        type=int,
        default=15_000,
        help="batches of the mixture (default: 15000)",
    )
    add("--module-batches", type=int, default=300, help="batches of the module (default: 300)")
    add("--rounds", type=int, default=3, help="epochs per loader (default: 3)")
    add("--quick", action="store_true", help="smoke test with few batches")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.batches, args.mixture_batches, args.module_batches, args.rounds = 20, 150, 5, 1
    return args


def main() -> int:
    done = report("states", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
