# SPDX-License-Identifier: Apache-2.0
"""How far the parts of a step are from known delays, and the cost of the ledger.

The dataset and the collate function sleep for known times, and the program between its batches. The
loop has separate clocks, to compare the ledger with. The cost is the time of next() with the batch
already here, with the calls of the ledger and without them in turns; and of these alone, many in a
row.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from figures import Record, add_report_options, report, run_main, summary
from table import aligned
from torch.utils.data import Dataset, default_collate

from penstock import DataLoader
from penstock.loader.local_iterator import LocalPoolIter

SAMPLE_S = 0.002
COLLATE_S = 0.005
BATCH = 4
STEP_S = 0.005  # of the step that the cost is a share of


class Sleeping(Dataset[torch.Tensor]):
    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds > 0:
            time.sleep(self.seconds)
        return torch.zeros(8)


def sleeping_collate(samples: Any) -> Any:
    time.sleep(COLLATE_S)
    return default_collate(samples)


def errors(workers: int, compute_s: float, steps: int) -> tuple[float, float]:
    """Of one epoch, in percent of its time: of the sum of all parts, and of the program's part."""
    loader = DataLoader(
        Sleeping(steps * BATCH, SAMPLE_S),
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=sleeping_collate,
        persistent_workers=workers > 0,
    )
    for _ in loader:  # the workers have started
        pass
    before = loader.stats().ledger
    computed_s = 0.0
    began_at = time.perf_counter()
    for _ in loader:
        got_at = time.perf_counter()
        time.sleep(compute_s)
        computed_s += time.perf_counter() - got_at
    whole_s = time.perf_counter() - began_at
    times = loader.stats().ledger - before
    return (
        100 * abs(times.total_s - whole_s) / whole_s,
        100 * abs(times.compute_s - computed_s) / whole_s,
    )


def next_us(steps: int, is_counted: bool) -> float:
    """The median time of next() for a batch that is here."""
    loader = DataLoader(Sleeping(steps + 8, 0.0), num_workers=1, prefetch_factor=4)
    counted = LocalPoolIter._next_data
    if not is_counted:
        LocalPoolIter._next_data = LocalPoolIter._next_batch  # type: ignore[method-assign]
    try:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        times = []
        for _ in range(steps):
            time.sleep(0.001)  # until the next is here
            called_at = time.perf_counter()
            next(iterator)
            times.append(time.perf_counter() - called_at)
    finally:
        LocalPoolIter._next_data = counted  # type: ignore[method-assign]
    return 1e6 * sorted(times)[len(times) // 2]


def calls_us(count: int) -> float:
    """The calls of one step alone."""
    iterator = iter(DataLoader(Sleeping(8, 0.0), num_workers=1))
    stream = iterator._stream  # type: ignore[attr-defined]
    began_at = time.perf_counter()
    for _ in range(count):
        stream.enter_step()
        stream.leave_step()
    return 1e6 * (time.perf_counter() - began_at) / count


def measure(args: argparse.Namespace) -> Iterator[Record]:
    for workers, compute_s in itertools.product((0, 1, 2), (0.002, 0.02)):
        found = [errors(workers, compute_s, args.steps) for _ in range(args.rounds)]
        parameters = {"workers": workers, "compute_s": compute_s}
        yield summary("ledger/sum_error_percent", parameters, [one for one, _ in found])
        yield summary("ledger/compute_error_percent", parameters, [one for _, one in found])
    rounds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.rounds):
        for is_counted in rounds:
            rounds[is_counted].append(next_us(20 * args.steps, is_counted))
    alone = [calls_us(1000 * args.steps) for _ in range(args.rounds)]
    yield summary("ledger/calls_us", {}, alone)
    for is_counted, times_us in rounds.items():
        yield summary("ledger/next_us", {"is_counted": is_counted}, times_us)


def table(everything: list[Record]) -> str:
    rows = [["workers", "program's work", "error of the sum", "error of the program's part"]]
    costs = [one for one in everything if one["name"] == "ledger/next_us"]
    alone = next(one["median"] for one in everything if one["name"] == "ledger/calls_us")
    found = [one for one in everything if one["name"].endswith("_percent")]
    for whole, compute in zip(found[::2], found[1::2], strict=True):
        of = whole["parameters"]
        rows.append(
            [
                str(of["workers"]),
                f"{1e3 * of['compute_s']:.0f} ms",
                f"{whole['median']:.3f} % (at most {whole['p90']:.3f} %)",
                f"{compute['median']:.3f} %",
            ]
        )
    with_it, without = (one["median"] for one in costs)
    share = 100 * alone / 1e6 / STEP_S
    return (
        f"{aligned(rows)}\n\nnext() takes {with_it:.1f} µs with the ledger's calls and "
        f"{without:.1f} µs without. The calls alone take {alone:.2f} µs: {share:.3f} % of a step "
        f"of {1e3 * STEP_S:.0f} ms"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_options(parser)
    parser.add_argument("--quick", action="store_true", help="smoke test with few steps")
    args = parser.parse_args()
    args.steps, args.rounds = (5, 1) if args.quick else (60, 5)
    return args


def main() -> int:
    done = report("ledger", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
