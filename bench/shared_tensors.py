# SPDX-License-Identifier: Apache-2.0
"""How fast one tensor that the dataset keeps is returned again and again: in shared memory, by
torch's loader and by ours, and in private memory (*copied*), by ours.

Each measurement has a separate forked process, and the kinds take turns within a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from figures import MeasurementError, Record, bench_parser, report, summary

import penstock

KINDS = {
    "torch": (torch.utils.data.DataLoader, True),
    "penstock": (penstock.DataLoader, True),
    "copied": (penstock.DataLoader, False),
}
WORKER_COUNT = 2
WARM_UP = 200


class ConstantTensor(torch.utils.data.Dataset[torch.Tensor]):
    """Always the same tensor."""

    def __init__(self, size_kib: int, is_shared: bool) -> None:
        self.tensor = torch.ones(size_kib << 10, dtype=torch.uint8)
        if is_shared:
            self.tensor.share_memory_()

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor


def rate(kind: str, size_kib: int, seconds: float) -> float:
    """Batches a second."""
    torch.set_num_threads(1)
    loader_class, is_shared = KINDS[kind]
    sampler = torch.utils.data.SequentialSampler(range(1 << 24))
    dataset = ConstantTensor(size_kib, is_shared)
    iterator = iter(
        loader_class(dataset, batch_size=None, sampler=sampler, num_workers=WORKER_COUNT)
    )
    for _ in range(WARM_UP):
        next(iterator)
    count = 0
    began_at = time.perf_counter()
    while time.perf_counter() - began_at < seconds:
        next(iterator)
        count += 1
    return count / (time.perf_counter() - began_at)


def _measure(sender: Any, *arguments: Any) -> None:
    sender.send(rate(*arguments))


def measured(kind: str, size_kib: int, seconds: float) -> float:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, kind, size_kib, seconds))
    process.start()
    sender.close()
    try:
        result: float = receiver.recv()
    except EOFError as error:
        raise MeasurementError(f"the process of {kind} at {size_kib} KiB died") from error
    process.join()
    return result


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    for size_kib in args.sizes:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for round_index in range(args.rounds):
            order = list(KINDS) if round_index % 2 == 0 else list(reversed(KINDS))
            for kind in order:
                rates[kind].append(measured(kind, size_kib, args.seconds))
        for kind, values in rates.items():
            parameters = {"kind": kind, "size_kib": size_kib}
            yield summary("shared_tensors/batches_per_s", parameters, values)


def table(records: list[Record]) -> str:
    lines = [f"| KiB | {' | '.join(f'{kind}, 1/s' for kind in KINDS)} |"]
    lines.append("| --- " * (len(KINDS) + 1) + "|")
    medians = {(r["parameters"]["size_kib"], r["parameters"]["kind"]): r["median"] for r in records}
    for size_kib in dict.fromkeys(size_kib for size_kib, _ in medians):
        figures = [f"{medians[size_kib, kind]:,.0f}" for kind in KINDS]
        lines.append(f"| {size_kib:,} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=1.0, help="timed seconds of a measurement")
    sizes = [16, 32, 64, 128, 256, 1024, 8192, 32768]
    add("--sizes", type=int, nargs="+", default=sizes, help="tensor sizes in KiB")
    add("--quick", action="store_true", help="smoke test: one short round of two sizes")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.sizes = 1, 0.1, [4, 1024]
    return 2 if report("shared_tensors", args, measure_all, table) is None else 0


if __name__ == "__main__":
    sys.exit(main())
