# SPDX-License-Identifier: Apache-2.0
"""An epoch with some samples that are much slower than the others: they sleep.

Each loader's share of its workers' capacity: the time that the samples and their collation take in
one process, divided by the number of workers, over the time that the epoch took. Batches arrive in
order, or as ``in_order`` allows. The loaders take turns; an epoch is timed from its first batch on,
since starting the workers is measured elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import process_tree
import torch
from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned, number
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from penstock import DataLoader

KINDS: dict[str, Any] = {
    "torch": TorchLoader,
    'penstock, seeding="worker"': DataLoader,
    'penstock, seeding="batch"': lambda *a, **k: DataLoader(*a, seeding="batch", **k),
    "the same, in_order=8": lambda *a, **k: DataLoader(*a, seeding="batch", in_order=8, **k),
    "the same, in_order=32": lambda *a, **k: DataLoader(*a, seeding="batch", in_order=32, **k),
    "the same, in_order=8, prefetch_factor=64": lambda *a, **k: DataLoader(
        *a, seeding="batch", in_order=8, prefetch_factor=64, **k
    ),
    "the same, in_order=True, prefetch_factor=64": lambda *a, **k: DataLoader(
        *a, seeding="batch", prefetch_factor=64, **k
    ),
    "the same, in_order=False": lambda *a, **k: DataLoader(
        *a, seeding="batch", in_order=False, **k
    ),
}


class Uneven(Dataset[torch.Tensor]):
    """Every sample sleeps, one in ``1 / share`` of them ``factor`` times as long as the others."""

    def __init__(self, count: int, sleep_s: float, share: float, factor: float) -> None:
        drawn = random.Random(1)
        self.sleeps = [sleep_s * (factor if drawn.random() < share else 1) for _ in range(count)]
        self.made = torch.zeros(count, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.sleeps)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleeps[index])
        self.made[index] = True
        return torch.full((16,), index)


def seconds_of(sleep_s: float, batch_size: int) -> float:
    """The time of a sample that sleeps this long, in one process, with its part of the
    collation."""
    samples = Uneven(max(1, int(0.3 / sleep_s / batch_size)) * batch_size, sleep_s, 0, 1)
    begin = time.perf_counter()
    for _ in TorchLoader(samples, batch_size=batch_size):
        pass
    return (time.perf_counter() - begin) / len(samples)


def share_of(
    make: Any, dataset: Uneven, batch_size: int, worker_count: int, taken_s: dict[float, float]
) -> float:
    dataset.made.fill_(False)
    loader = make(dataset, batch_size=batch_size, num_workers=worker_count)
    batches = iter(loader)
    arrived: list[int] = []
    first = next(batches)
    # Work that the workers had done before the clock started is left out.
    left = [dataset.sleeps[index] for index in (~dataset.made).nonzero().flatten().tolist()]
    begin = time.perf_counter()
    for batch in itertools.chain([first], batches):
        arrived += map(int, batch[:, 0].tolist())
    seconds = time.perf_counter() - begin
    if (arrived if loader.in_order is True else sorted(arrived)) != [*range(len(dataset))]:
        raise MeasurementError("samples are missing, doubled or out of order")
    return sum(taken_s[sleep_s] for sleep_s in left) / worker_count / seconds


def measure(args: argparse.Namespace) -> Iterator[Record]:
    for batch_size in args.batch_size:
        count = max(batch_size, int(args.seconds * args.workers / args.sleep_s / 2))
        dataset = Uneven(count, args.sleep_s, args.share, args.factor)
        shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
        begin, busy_s = time.perf_counter(), process_tree.machine_busy_s()
        for turn in range(args.rounds):
            print(f"batches of {batch_size}, round {turn + 1}", file=sys.stderr, flush=True)
            taken_s = {sleep_s: seconds_of(sleep_s, batch_size) for sleep_s in set(dataset.sleeps)}
            for kind, make in KINDS.items():
                share = share_of(make, dataset, batch_size, args.workers, taken_s)
                shares[kind].append(share)
        for kind, seen in shares.items():
            yield summary("uneven/share_of_workers", {"kind": kind, "batch_size": batch_size}, seen)
        busy = (process_tree.machine_busy_s() - busy_s) / (time.perf_counter() - begin)
        yield summary("uneven/busy_cores", {"kind": "all", "batch_size": batch_size}, [busy])


def table(everything: list[Record]) -> str:
    """The medians, a row for each size of batch."""
    rows = [["batch size", *KINDS]]
    found = {
        (r["parameters"]["batch_size"], r["parameters"]["kind"]): r["median"] for r in everything
    }
    for batch_size in dict.fromkeys(size for size, _ in found):
        shares = [found.get((batch_size, kind)) for kind in KINDS]
        rows.append([str(batch_size), *("" if s is None else number(s) for s in shares)])
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--batch-size",
        type=int,
        nargs="+",
        default=[4, 8, 16, 32],
        help="batch sizes (default: 4 8 16 32)",
    )
    add("--workers", type=int, default=4, help="workers per loader (default: 4)")
    add("--sleep-s", type=float, default=0.001, help="sleep of a normal sample (default: 0.001)")
    add("--share", type=float, default=0.05, help="share of slow samples (default: 0.05)")
    add("--factor", type=float, default=20.0, help="slowdown of slow samples (default: 20)")
    add("--seconds", type=float, default=4.0, help="approximate duration of an epoch (default: 4)")
    add("--rounds", type=int, default=5, help="epochs per loader (default: 5)")
    add("--quick", action="store_true", help="smoke test: one short round")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.batch_size = 1, 0.3, args.batch_size[:1]
    return args


def main() -> int:
    done = report("uneven", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
