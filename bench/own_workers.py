# SPDX-License-Identifier: Apache-2.0
"""A trainer's local workers with a pool against the workers of a loader without a pool: the rate of
batches that are ready, in turns. The pool is a controller without workers.

Each measurement has a fresh process, which is this file as well (--way).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pool_samples
import process_tree
from figures import MeasurementError, Record, bench_parser, report, summary
from pool_host import PoolHost

WAYS = ("local", "own")
WORKER_COUNT = 2
EPOCH_BATCHES = 1_000_000


def measure(args: argparse.Namespace) -> dict[str, float]:
    import torch

    from penstock import DataLoader, Pool

    torch.set_num_threads(1)
    options: dict[str, Any] = {"num_workers": WORKER_COUNT, "seeding": "batch", "timeout": 60}
    if args.way == "own":
        options["pool"] = Pool(args.pool, keys=args.keys, code_paths=[pool_samples.CODE])
    loader = DataLoader(
        pool_samples.Ready(EPOCH_BATCHES, args.kib << 10), batch_size=None, **options
    )
    batches = iter(loader)
    _take(batches, args.warmup)
    used = process_tree.usage(os.getpid())
    begin = time.perf_counter()
    count = _take(batches, args.seconds)
    seconds = time.perf_counter() - begin
    used = process_tree.usage(os.getpid()) - used
    return {
        "batches_per_s": count / seconds,
        "cpu_ms": 1e3 * used.cpu_s / count,
        "faults": used.minor_faults / count,
    }


def _take(batches: Iterator[Any], seconds: float) -> int:
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        next(batches)
        count += 1
    return count


def measured(way: str, kib: int, pool: PoolHost, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--kib", str(kib)]
    command += ["--pool", pool.endpoint, "--keys", pool.keys]
    command += ["--seconds", str(args.seconds), "--warmup", str(args.warmup)]
    # The keys of the trainer's local processes are in the folder of the pool's keys.
    environment = os.environ | {"XDG_RUNTIME_DIR": str(Path(pool.keys).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    if done.returncode != 0:
        raise MeasurementError(
            f"{way} at {kib} KiB exited with code {done.returncode}:\n{done.stderr}"
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as folder, PoolHost(Path(folder)) as pool:
        for kib in args.sizes:
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for round_index in range(args.rounds):
                for way in WAYS if round_index % 2 == 0 else reversed(WAYS):
                    found[way].append(measured(way, kib, pool, args))
            for way, figures in found.items():
                for name in figures[0]:
                    values = [one[name] for one in figures]
                    yield summary(f"own_workers/{name}", {"way": way, "kib": kib}, values)
            pairs = zip(found["own"], found["local"], strict=True)
            ratios = [own["batches_per_s"] / local["batches_per_s"] for own, local in pairs]
            yield summary("own_workers/ratio", {"way": "own", "kib": kib}, ratios)


def table(records: list[Record]) -> str:
    figures = {(r["name"], r["parameters"]["way"], r["parameters"]["kib"]): r for r in records}
    lines = [
        "| KiB | local, batches/s | with a pool | ratio | CPU ms per batch, local, with a pool |"
        " faults per batch, local, with a pool |",
        "| --- " * 6 + "|",
    ]
    for kib in dict.fromkeys(kib for _, _, kib in figures):
        ratio = figures["own_workers/ratio", "own", kib]

        def both(name: str, style: str, kib: int = kib) -> list[str]:
            return [
                format(figures[f"own_workers/{name}", way, kib]["median"], style) for way in WAYS
            ]

        local, beside = both("batches_per_s", ",.0f")
        lines.append(
            f"| {kib:,} | {local} | {beside} | {ratio['median']:.2f} ({ratio['p10']:.2f} to "
            f"{ratio['p90']:.2f}) | {', '.join(both('cpu_ms', '.2f'))} | "
            f"{', '.join(both('faults', '.1f'))} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=2.0, help="timed seconds of a measurement")
    add("--warmup", type=float, default=1.0, help="seconds of warm-up")
    add("--sizes", type=int, nargs="+", default=[64, 4096, 37632], help="batch sizes in KiB")
    add("--quick", action="store_true", help="smoke test: one short round of one size")
    for name in ("way", "pool", "keys"):
        add(f"--{name}", help=argparse.SUPPRESS)
    add("--kib", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return 0
    if args.quick:
        args.rounds, args.seconds, args.warmup, args.sizes = 1, 0.2, 0.1, [64]
    return 2 if report("own_workers", args, measure_all, table) is None else 0


if __name__ == "__main__":
    sys.exit(main())
