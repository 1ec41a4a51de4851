# SPDX-License-Identifier: Apache-2.0
"""Photographs on a store whose every read takes some milliseconds: torch's loader, penstock without
reading ahead, and penstock.

The store is a FUSE file system, bench/slow_store.cpp, mounted again for each cold measurement, so
that the kernel's cache is empty; a warm measurement reads the same mount again. Each measurement is
one epoch in a fresh process. Needs root, fuse3 and libfuse3-dev.
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

from figures import MeasurementError, Record, bench_parser, log, report, run_main, summary

HERE = Path(__file__).resolve().parent
KINDS = {"torch": "torch", "without": "penstock", "penstock": "penstock"}
WORKER_COUNT = 2


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="epochs of each kind")
    add("--milliseconds", type=int, default=5, help="time of a read of the store")
    add("--quick", action="store_true", help="smoke test: little data")
    add("--data", type=Path, default=HERE / "out", help="folder for generated data")
    add("--epoch", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    add("--kind", choices=sorted(set(KINDS.values())), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.epoch is not None:
        print(json.dumps(epoch(args.epoch, args.kind)))
        return 0
    return 0 if report("read_ahead", args, measure, markdown) is not None else 1


def epoch(folder: Path, kind: str) -> dict[str, float]:
    """Read every photograph once."""
    from workloads import photographs

    arguments = photographs.build(folder)
    arguments["dataset"].samples = arguments["dataset"].samples[: len(arguments["dataset"]) // 8]
    arguments["batch_size"] = 32
    if kind == "penstock":
        from penstock import DataLoader
    else:
        from torch.utils.data import DataLoader  # type: ignore[assignment]
    loader: Any = DataLoader(**arguments, num_workers=WORKER_COUNT)
    began = time.perf_counter()
    count = sum(len(labels) for _, labels in loader)
    return {"samples_per_s": count / (time.perf_counter() - began)}


def measure(args: argparse.Namespace) -> Iterator[Record]:
    from workloads import photographs

    folder = photographs.WORKLOAD.folder(args.data, args.quick)
    with tempfile.TemporaryDirectory() as place:
        store = _built_store(Path(place))
        rounds: dict[tuple[str, str], list[float]] = {}
        for turn in range(args.rounds):
            for kind in [*KINDS][:: 1 if turn % 2 == 0 else -1]:
                with _Mount(store, folder, args.milliseconds, Path(place) / "mount") as mount:
                    for state in ("cold", "warm"):
                        log(f"round {turn + 1} of {args.rounds}: {kind}, {state}")
                        rounds.setdefault((kind, state), []).append(_rate(kind, mount))
    for (kind, state), rates in rounds.items():
        about = {"kind": kind, "cache": state, "milliseconds": args.milliseconds}
        yield summary("read_ahead/samples_per_s", about, rates)
        for other in ("torch", "without"):
            ratios = [a / b for a, b in zip(rates, rounds[other, state], strict=True)]
            yield summary("read_ahead/ratio", {**about, "over": other}, ratios)


def _rate(kind: str, mount: Path) -> float:
    environment = {**os.environ, "PENSTOCK_READAHEAD": "0" if kind == "without" else "1"}
    command = [sys.executable, __file__, "--epoch", str(mount), "--kind", KINDS[kind]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise MeasurementError(f"{kind}: {done.stderr[-1000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def _built_store(folder: Path) -> Path:
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True
    )
    if flags.returncode != 0:
        raise MeasurementError("the store needs libfuse3-dev; install it, with fuse3")
    program = folder / "slow_store"
    source = str(HERE / "slow_store.cpp")
    command = ["c++", "-std=c++20", "-O1", "-pthread", source, "-o", str(program)]
    subprocess.run([*command, *flags.stdout.split()], check=True)
    return program


class _Mount:
    """The store, mounted in a scope."""

    def __init__(self, store: Path, folder: Path, milliseconds: int, place: Path) -> None:
        self._place = place
        place.mkdir(exist_ok=True)
        self._server = subprocess.Popen(
            [str(store), str(folder), str(milliseconds), "-f", str(place)],
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 10
        while not place.is_mount():
            if time.monotonic() > until or self._server.poll() is not None:
                self._server.kill()
                raise MeasurementError("the store was not mounted; run this as root, with fuse3")
            time.sleep(0.05)

    def __enter__(self) -> Path:
        return self._place

    def __exit__(self, *error: object) -> None:
        subprocess.run(["fusermount3", "-u", str(self._place)], check=False)
        self._server.wait(10)


def markdown(records: list[Record]) -> str:
    """A table of rates, and of ratios with their spread."""
    lines = ["| cache | loader | samples/s | of torch | of penstock without | n |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    rates = [one for one in records if one["name"].endswith("samples_per_s")]
    for rate in rates:
        about = rate["parameters"]
        cells = [
            next(
                f"{one['median']:.2f} ({one['p10']:.2f} to {one['p90']:.2f})"
                for one in records
                if one["name"].endswith("ratio") and one["parameters"] == {**about, "over": other}
            )
            for other in ("torch", "without")
        ]
        row = [about["cache"], about["kind"], f"{rate['median']:,.0f}", *cells, str(rate["n"])]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
