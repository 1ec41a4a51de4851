# SPDX-License-Identifier: Apache-2.0
"""The cost of `penstock controller --keep` for a job that finds none of its batches, and its saving
for jobs that have one seed.

Each pool is a controller and one `penstock worker` with two workers on loopback, without --keep or
with it; the pools take turns. "no reuse" is the rate of a job whose epochs have different seeds, so
no batch is asked for twice: of batches that exist already, and of batches that take about 50 ms of
CPU time; the store is full before the first round. "jobs" is the CPU time of the workers for --jobs
jobs at once that have one seed, over one job's.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import process_tree
import torch
from figures import Record, bench_parser, report, run_main, summary
from pool_host import PoolHost
from pool_samples import CODE, Rows, Worked
from table import aligned

from penstock import DataLoader, Pool

WORKERS = 2
KINDS = ("off", "keep")
SIZES = {"small rows": (64, 4096), "photographs": (32, 150_528)}  # batch, bytes of a sample


def loader_of(
    host: PoolHost, dataset: Rows | Worked, batch_size: int, seed: int
) -> DataLoader[torch.Tensor]:
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        seeding="batch",
        generator=torch.Generator().manual_seed(seed),
        pool=Pool(host.endpoint, keys=host.keys, code_paths=[CODE]),
        overlap_epochs=False,  # or workers would make batches while the other pool is measured
        timeout=120,
    )


def rate(loader: DataLoader[torch.Tensor]) -> float:
    """Batches in a second of one epoch, from the first batch on."""
    count, begun = -1, 0.0
    for _ in loader:
        count += 1
        begun = begun or time.perf_counter()
    return count / (time.perf_counter() - begun)


def cpu_s_of_jobs(host: PoolHost, job_count: int, samples: int, seed: int) -> float:
    """The CPU time of the workers for an epoch of jobs that run at once."""

    def train() -> None:
        for _ in loader_of(host, Worked(samples), 16, seed):
            pass

    before = process_tree.usage(host.supervisor_pid)
    threads = [threading.Thread(target=train) for _ in range(job_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (process_tree.usage(host.supervisor_pid) - before).cpu_s


def measure(args: argparse.Namespace) -> Iterator[Record]:
    with contextlib.ExitStack() as stack:
        hosts: dict[str, PoolHost] = {}
        for kind in KINDS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            keep = args.keep if kind == "keep" else ""
            hosts[kind] = stack.enter_context(PoolHost(folder, keep=keep))
            hosts[kind].start_command(WORKERS)
        for size, (batch_size, sample_bytes) in SIZES.items():
            rows = Rows(args.batches * batch_size, sample_bytes, 256)
            yield from rates(args, hosts, size, rows, batch_size, args.warmup_epochs)
        worked = Worked(args.batches // 4 * 16)
        yield from rates(args, hosts, "50 ms of work", worked, 16, 1)
        yield from jobs(args, hosts["keep"])


def rates(
    args: argparse.Namespace,
    hosts: dict[str, PoolHost],
    size: str,
    dataset: Rows | Worked,
    batch_size: int,
    warmup_epochs: int,
) -> Iterator[Record]:
    loaders = {kind: loader_of(host, dataset, batch_size, 1) for kind, host in hosts.items()}
    for loader in loaders.values():
        for _ in range(warmup_epochs):
            rate(loader)
    rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(args.rounds):
        for kind in KINDS if round_ % 2 else reversed(KINDS):
            rounds[kind].append(rate(loaders[kind]))
    for kind in KINDS:
        case = {"kind": kind, "size": size}
        yield summary("kept_batches/batches_per_s", case, rounds[kind])
    ratios = [keep / off for off, keep in zip(rounds["off"], rounds["keep"], strict=True)]
    yield summary("kept_batches/ratio", {"kind": "keep", "size": size}, ratios)


def jobs(args: argparse.Namespace, host: PoolHost) -> Iterator[Record]:
    cpu_s_of_jobs(host, 1, 64, 0)  # the processes of the first job start
    ratios = []
    for round_ in range(args.job_rounds):
        one = cpu_s_of_jobs(host, 1, args.samples, 2 * round_ + 1)
        ratios.append(cpu_s_of_jobs(host, args.jobs, args.samples, 2 * round_ + 2) / one)
    yield summary("kept_batches/cpu_ratio", {"kind": "keep", "jobs": args.jobs}, ratios)


def table(everything: list[Record]) -> str:
    rows = [["measured", "case", "--keep", "median", "10th to 90th"]]
    labels = {
        "batches_per_s": "batches a second, no reuse",
        "ratio": "over no --keep",
        "cpu_ratio": "CPU time over one job",
    }
    for found in everything:
        name = found["name"].rpartition("/")[2]
        case = found["parameters"]
        rows.append(
            [
                labels[name],
                str(case["size"] if "size" in case else f"{case['jobs']} jobs"),
                "no" if case["kind"] == "off" else "yes",
                f"{found['median']:.3f}",
                f"{found['p10']:.3f} to {found['p90']:.3f}",
            ]
        )
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="epochs of each pool and size")
    add("--batches", type=int, default=400, help="batches of an epoch")
    add("--warmup-epochs", type=int, default=10, help="epochs before, which fill the store")
    add("--keep", default="512MB", help="memory of the store")
    add("--jobs", type=int, default=4, help="jobs at once")
    add("--job-rounds", type=int, default=3, help="rounds of these")
    add("--samples", type=int, default=6144, help="samples of an epoch of these")
    add("--quick", action="store_true", help="smoke test with few batches")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batches, args.warmup_epochs = 1, 16, 1
        args.job_rounds, args.samples = 1, 64
    return args


def main() -> int:
    everything = report("kept_batches", parse_arguments(), measure, table)
    return 1 if everything is None else 0


if __name__ == "__main__":
    run_main(main)
