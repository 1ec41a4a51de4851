# SPDX-License-Identifier: Apache-2.0
"""The cost per step of observing it: without observers, with a trace, OpenTelemetry or
torch.profiler.

*nobody_ns* is the check for observers, which each batch pays. The others are how much longer a step
of small ready batches takes on the trainer's thread than an unobserved step.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from figures import Record, bench_parser, report, summary
from torch.profiler import ProfilerActivity, profile

import penstock
from penstock.loader.watched_steps import are_watched

LOOKS = 100_000


def watchers(folder: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "trace": lambda: penstock.trace(folder / "trace.json", steps=100_000),
        "profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    }
    if importlib.util.find_spec("opentelemetry") is not None:
        found["metrics"] = lambda: penstock.to_opentelemetry(spans=False)
    if importlib.util.find_spec("opentelemetry.sdk") is not None:
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider(shutdown_on_exit=False)
        found["spans"] = lambda: penstock.to_opentelemetry(provider)
    return found


def measure(args: argparse.Namespace) -> Iterator[Record]:
    yield summary("watched_steps/nobody_ns", {}, [look_ns() for _ in range(args.rounds)])
    data = torch.utils.data.TensorDataset(torch.zeros(args.batches * 4, 8))
    loader = penstock.DataLoader(
        data, batch_size=4, num_workers=1, prefetch_factor=64, persistent_workers=True
    )
    step_us(loader)
    with tempfile.TemporaryDirectory() as folder:
        for case, watch in watchers(Path(folder)).items():
            added = []
            for _ in range(args.rounds):
                alone = step_us(loader)
                with watch():
                    added.append(step_us(loader) - alone)
            yield summary("watched_steps/added_us", {"case": case}, added)


def look_ns() -> float:
    began_at = time.perf_counter_ns()
    for _ in range(LOOKS):
        are_watched()
    looked_at = time.perf_counter_ns()
    for _ in range(LOOKS):
        pass
    return (looked_at - began_at - (time.perf_counter_ns() - looked_at)) / LOOKS


def step_us(loader: Any) -> float:
    """The median time of next() on batches that are here."""
    times = []
    batches = iter(loader)
    while True:
        if loader.stats().ready == 0:
            time.sleep(0.002)  # so that the worker gets ahead
        began_at = time.perf_counter_ns()
        try:
            next(batches)
        except StopIteration:
            return sorted(times)[len(times) // 2] / 1e3
        times.append(time.perf_counter_ns() - began_at)


def table(records: list[Record]) -> str:
    lines = ["| watched by | added to a step |", "| --- | --- |"]
    for record in records:
        case, unit = record["parameters"].get("case", "nobody"), record["name"].rpartition("_")[2]
        lines.append(f"| {case} | {record['median']:.3g} {unit.replace('us', 'µs')} |")
    return "\n".join(lines)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=1000, help="batches per round")
    parser.add_argument("--quick", action="store_true", help="smoke test: one short round")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batches = 1, 50
    return 2 if report("watched_steps", args, measure, table) is None else 0


if __name__ == "__main__":
    sys.exit(main())
