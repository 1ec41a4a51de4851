# SPDX-License-Identifier: Apache-2.0
"""What a record of visits costs.

- record: the CPU time of the trainer's thread for a batch of a shuffled epoch of a million samples,
  in nanoseconds, from the order that the native side draws ("order") and from a list of a sampler
  ("list"); and the bytes that it takes. There is a pause after every 100 batches, as a trainer has
  steps between them: a thread makes the pages of the file meanwhile.
- compare: the time in which two equal runs are compared by their roots, in milliseconds, after the
  first reading of each ("first").
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from figures import Record, bench_parser, report, run_main, summary
from table import aligned, number

from penstock import _pool

SAMPLES = 1_000_000
BATCH_SIZES = (1, 64, 1024)
BURST = 100  # batches
PAUSE_S = 0.002


def parse_arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few batches, for a test")
    return parser.parse_args()


def recorder_in(folder: Path) -> Any:
    session = _pool.VisitSession(
        time_ns=time.time_ns(),
        loader="bench",
        dataset="numbers",
        sampler="RandomSampler",
        job="",
        dataset_size=SAMPLES,
        samples_per_epoch=SAMPLES,
        flags=_pool.VISIT_IN_ORDER,
    )
    folder.mkdir(exist_ok=True)
    return _pool.VisitRecorder(str(folder / _pool.visit_file_name(0, 1)), 0, 1, session)


def measure_recording(folder: Path, size: int, round_count: int, most: int) -> Iterator[Record]:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    count = min(most, SAMPLES // size // BURST * BURST)
    lists = [order[place * size : place * size + size].tolist() for place in range(min(count, 500))]
    recorder = recorder_in(folder)
    recorder.set_order(order.numpy())
    appends: dict[str, Callable[[int], Any]] = {
        "order": lambda place: recorder.append_order(0, place, place * size, size),
        "list": lambda place: recorder.append(0, place, lists[place % len(lists)]),
    }
    times: dict[str, list[float]] = {source: [] for source in appends}
    before = recorder.bytes
    for _ in range(round_count):
        for source, append in appends.items():
            took_s = 0.0
            for first in range(0, count, BURST):
                time.sleep(PAUSE_S)
                began_at = time.thread_time()
                for place in range(first, first + BURST):
                    append(place)
                took_s += time.thread_time() - began_at
            times[source].append(took_s / count * 1e9)
    bytes_each = (recorder.bytes - before) / (2 * round_count * count)
    recorder.close()
    for source, values in times.items():
        parameters = {"batch_size": size, "source": source, "bytes": round(bytes_each, 1)}
        yield summary("visits/record", parameters, values, 1)


def measure_comparison(folder: Path, step_count: int) -> Iterator[Record]:
    for name in ("a", "b"):
        recorder = recorder_in(folder / name)
        for step in range(step_count):
            recorder.append(0, step, [step * 7 % SAMPLES, step])
        recorder.close()
    times = []
    for _ in range(11):
        began_at = time.perf_counter()
        runs = [_pool.VisitFolder.open(str(folder / name)) for name in ("a", "b")]
        assert _pool.VisitFolder.compare(*runs)["is_by_roots"]
        times.append((time.perf_counter() - began_at) * 1e3)
    first, *later = times
    yield summary("visits/compare", {"steps": step_count, "reading": "first"}, [first], 2)
    yield summary("visits/compare", {"steps": step_count, "reading": "later"}, later, 2)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as name:
        for size in BATCH_SIZES:
            folder = Path(name) / str(size)
            yield from measure_recording(folder, size, *((2, 500) if args.quick else (5, 20_000)))
        yield from measure_comparison(Path(name), 20_000 if args.quick else 1_000_000)


def table(records: list[Record]) -> str:
    rows = [["batch", "from", "ns of CPU per batch", "bytes per batch"]]
    for one in records:
        given = one["parameters"]
        if one["name"] == "visits/record":
            cells = [str(given["batch_size"]), given["source"], number(one["median"])]
            rows.append([*cells, str(given["bytes"])])
    compared = [["steps", "reading", "ms"]]
    for one in records:
        given = one["parameters"]
        if one["name"] == "visits/compare":
            compared.append([str(given["steps"]), given["reading"], number(one["median"])])
    return f"{aligned(rows)}\n\n{aligned(compared)}"


def main() -> int:
    done = report("visits", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
