# SPDX-License-Identifier: Apache-2.0
"""Rows of a table, 13 columns of float32 and 26 of int64, in batches of 4,096: torch's loader and
ours with two workers, over two processes that make the same batches for themselves.

A dataset gives its rows in one of several ways (WAYS). Each measurement has a separate forked
process, and the kinds take turns within a round.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import process_tree
import pyarrow
import pyarrow.parquet
import torch
from figures import MeasurementError, Record, bench_parser, report, summary
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

import penstock

KINDS = ("processes", "torch", "penstock")
LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "penstock": penstock.DataLoader}
PROCESS_COUNT = 2
BATCH_ROWS = 4096
ROW_COUNT = 64 * BATCH_ROWS
BATCH_BYTES = BATCH_ROWS * (13 * 4 + 26 * 8)
COUNTS = [f"i{column}" for column in range(13)]
CATEGORIES = [f"c{column}" for column in range(26)]


class TensorRows(Dataset[Any]):
    """A row is a pair of tensors."""

    def __init__(self) -> None:
        counts, categories = _table()
        self.counts, self.categories = torch.from_numpy(counts), torch.from_numpy(categories)

    def __len__(self) -> int:
        return ROW_COUNT

    def __getitem__(self, index: int) -> Any:
        return self.counts[index], self.categories[index]


class ListedRows(TensorRows):
    """The rows of a batch are requested together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        counts, categories = self.counts[indices], self.categories[indices]
        return list(zip(counts.unbind(), categories.unbind(), strict=True))


class ArrayRows(Dataset[Any]):
    """A row is a pair of numpy arrays."""

    def __init__(self) -> None:
        self.counts, self.categories = _table()

    def __len__(self) -> int:
        return ROW_COUNT

    def __getitem__(self, index: int) -> Any:
        return self.counts[index], self.categories[index]


class ScalarRows(ArrayRows):
    """A row is a dict of 39 numpy scalars."""

    def __getitem__(self, index: int) -> Any:
        return dict(zip(COUNTS, self.counts[index], strict=True)) | dict(
            zip(CATEGORIES, self.categories[index], strict=True)
        )


class NumberRows(ArrayRows):
    """A row is a dict of 39 Python numbers."""

    def __getitem__(self, index: int) -> Any:
        return dict(zip(COUNTS, self.counts[index].tolist(), strict=True)) | dict(
            zip(CATEGORIES, self.categories[index].tolist(), strict=True)
        )


class Columns(Dataset[Any]):
    """An item is a whole batch: a dict of 39 columns, of the requested rows."""

    def __init__(self) -> None:
        counts, categories = _table()
        self.columns = {name: counts[:, place].copy() for place, name in enumerate(COUNTS)}
        self.columns |= {name: categories[:, place].copy() for place, name in enumerate(CATEGORIES)}

    def __len__(self) -> int:
        return ROW_COUNT

    def __getitem__(self, indices: list[int]) -> Any:
        rows = numpy.array(indices)
        return {name: column[rows] for name, column in self.columns.items()}


class ParquetRows(IterableDataset[Any]):
    """An item is a whole batch, read from a Parquet file: a dict of 39 columns."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return self.read(0, 1) if info is None else self.read(info.id, info.num_workers)

    def read(self, index: int, count: int) -> Iterator[Any]:
        with pyarrow.parquet.ParquetFile(self.path) as file:
            groups = list(range(index, file.num_row_groups, count))
            for rows in file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False):
                yield {
                    name: torch.from_numpy(rows[name].to_numpy().copy())
                    for name in rows.schema.names
                }


WAYS: dict[str, Callable[[], Any]] = {
    "tensors": TensorRows,
    "listed tensors": ListedRows,
    "arrays": ArrayRows,
    "scalars": ScalarRows,
    "numbers": NumberRows,
    "columns": Columns,
    "parquet": lambda: ParquetRows(_parquet_file()),
}


def _table() -> tuple[Any, Any]:
    draw = numpy.random.default_rng(0)
    counts = draw.lognormal(2, 2, (ROW_COUNT, 13)).astype(numpy.float32)
    return counts, draw.integers(0, 100_000, (ROW_COUNT, 26))


def _parquet_file() -> str:
    path = Path(tempfile.gettempdir()) / f"penstock-rows-{os.getuid()}.parquet"
    counts, categories = _table()
    columns = {name: counts[:, place] for place, name in enumerate(COUNTS)}
    columns |= {name: categories[:, place] for place, name in enumerate(CATEGORIES)}
    partial = path.with_suffix(f".{os.getpid()}")
    pyarrow.parquet.write_table(pyarrow.table(columns), partial, row_group_size=ROW_COUNT // 16)
    partial.rename(path)
    return str(path)


def batches_of_loader(kind: str, dataset: Any) -> Iterator[Any]:
    options: dict[str, Any] = {"num_workers": PROCESS_COUNT, "persistent_workers": True}
    if isinstance(dataset, IterableDataset):
        options |= {"batch_size": None}
    elif isinstance(dataset, Columns):
        sampler = BatchSampler(RandomSampler(dataset), BATCH_ROWS, drop_last=True)
        options |= {"batch_size": None, "sampler": sampler}
    else:
        options |= {"batch_size": BATCH_ROWS, "shuffle": True}
    loader = LOADERS[kind](dataset, **options)
    while True:
        yield from loader


def batches_of_process(dataset: Any, index: int) -> Iterator[Any]:
    """The rate of one of the processes without a loader."""
    while isinstance(dataset, IterableDataset):
        yield from dataset.read(index, PROCESS_COUNT)  # type: ignore[attr-defined]
    while True:
        order = torch.randperm(ROW_COUNT).tolist()
        for start in range(index * BATCH_ROWS, ROW_COUNT, PROCESS_COUNT * BATCH_ROWS):
            indices = order[start : start + BATCH_ROWS]
            if isinstance(dataset, Columns):
                yield default_convert(dataset[indices])
            elif hasattr(dataset, "__getitems__"):
                yield default_collate(dataset.__getitems__(indices))
            else:
                yield default_collate([dataset[row] for row in indices])


def rate_of(batches: Iterator[Any], args: argparse.Namespace) -> dict[str, float]:
    warm = time.perf_counter() + args.warmup
    while time.perf_counter() < warm:
        next(batches)
    count, used, own = 0, process_tree.usage(os.getpid()), _own_faults()
    begin = now = time.perf_counter()
    while now < begin + args.seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    used, own = process_tree.usage(os.getpid()) - used, _own_faults() - own
    megabytes = count * BATCH_BYTES / 1e6
    return {
        "batches_per_s": count / (now - begin),
        "cpu_ms": 1e3 * used.cpu_s / count,
        "faults_per_mb": used.minor_faults / megabytes,
        "worker_faults_per_mb": (used.minor_faults - own) / megabytes,
    }


def _own_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _measure(sender: Any, kind: str, way: str, index: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dataset = DATASETS[way]
    torch.manual_seed(index)
    if kind == "processes":
        sender.send(rate_of(batches_of_process(dataset, index), args))
    else:
        sender.send(rate_of(batches_of_loader(kind, dataset), args))


DATASETS: dict[str, Any] = {}  # of the way that is being measured, made before its processes fork


def measured(kind: str, way: str, args: argparse.Namespace) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    running = []
    for index in range(PROCESS_COUNT if kind == "processes" else 1):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_measure, args=(sender, kind, way, index, args))
        process.start()
        sender.close()
        running.append((process, receiver))
    found = []
    for _, receiver in running:
        try:
            found.append(receiver.recv())
        except EOFError as error:
            raise MeasurementError(f"a process of {kind} with {way} died") from error
    for process, _ in running:
        process.join()
    together = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    together["batches_per_s"] = sum(one["batches_per_s"] for one in found)
    return together


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    for way in args.ways:
        DATASETS.clear()
        DATASETS[way] = WAYS[way]()
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _, kinds in zip(
            range(args.rounds), itertools.cycle((KINDS, KINDS[::-1])), strict=False
        ):
            for kind in kinds:
                rounds[kind].append(measured(kind, way, args))
        for kind, figures in rounds.items():
            for name in figures[0]:
                values = [one[name] for one in figures]
                yield summary(f"tabular_rows/{name}", {"way": way, "kind": kind}, values)
            pairs = zip(figures, rounds["processes"], strict=True)
            ratios = [one["batches_per_s"] / limit["batches_per_s"] for one, limit in pairs]
            yield summary("tabular_rows/of_processes", {"way": way, "kind": kind}, ratios)


def table(records: list[Record]) -> str:
    figures = {(r["name"], r["parameters"]["way"], r["parameters"]["kind"]): r for r in records}
    lines = [
        "| rows | two processes, batches/s | torch | penstock | torch over processes |"
        " penstock over processes | worker faults per MB, torch, penstock |"
        " with the trainer's | CPU ms per batch, processes, torch, penstock |",
        "| --- " * 9 + "|",
    ]
    for way in dict.fromkeys(way for _, way, _ in figures):

        def medians(name: str, style: str, kinds: tuple[str, ...], way: str = way) -> list[str]:
            return [format(figures[f"tabular_rows/{name}", way, k]["median"], style) for k in kinds]

        def spread(kind: str, way: str = way) -> str:
            ratio = figures["tabular_rows/of_processes", way, kind]
            return f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})"

        cells = [
            way,
            *medians("batches_per_s", ",.1f", KINDS),
            spread("torch"),
            spread("penstock"),
            ", ".join(medians("worker_faults_per_mb", ".2f", KINDS[1:])),
            ", ".join(medians("faults_per_mb", ".2f", KINDS[1:])),
            ", ".join(medians("cpu_ms", ".1f", KINDS)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=3.0, help="timed seconds of a measurement")
    add("--warmup", type=float, default=2.0, help="seconds of warm-up")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to return rows")
    add("--quick", action="store_true", help="smoke test: one short round of two ways")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.warmup = 1, 0.2, 0.1
        args.ways = ["arrays", "columns"]
    return 2 if report("tabular_rows", args, measure_all, table) is None else 0


if __name__ == "__main__":
    sys.exit(main())
