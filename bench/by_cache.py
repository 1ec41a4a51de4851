# SPDX-License-Identifier: Apache-2.0
"""The bytes that ranks with caches read again, with Ranks(share="by_cache") and without.

Each rank is a process of this machine over gloo, with a penstock.cached() that holds 1/N or 1/(2N)
of the data, and reads one file. Reported are the samples of the last epoch that ranks owned, those
found in the rank's cache, and bytes of the file that were read; the bytes are compared with the
kernel's count, and the samples of each step in all cases with each other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned, number
from torch.utils.data import Dataset

from penstock import DataLoader, Ranks, cached

SAMPLE_BYTES = 4096
SECONDS_MAX = 3600


class Stored(Dataset[torch.Tensor]):
    """Samples in one file, which stands for a store that is far away."""

    fingerprint = "bench/by_cache.py"

    def __init__(self, path: str, count: int) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.count = count
        self.read_bytes = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        data = os.pread(self.fd, SAMPLE_BYTES, index * SAMPLE_BYTES)
        self.read_bytes += len(data)
        return torch.frombuffer(bytearray(data), dtype=torch.int64)


def stored_bytes() -> int:
    """The bytes of a budget for one sample."""
    probe = cached([torch.zeros(SAMPLE_BYTES // 8, dtype=torch.int64)], memory="1MB")  # type: ignore[arg-type]
    probe[0]
    return -(-probe.stats().bytes // 64) * 64


def kernel_read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def rank_main(job: dict[str, Any]) -> None:
    """Writes a line for each case: of each epoch, the samples of its steps, the hits, the samples
    that the rank owns, and the bytes read."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), job["samples"]
    with open(Path(job["folder"]) / f"rank-{rank}", "w") as out:
        for case in job["cases"]:
            data = Stored(job["path"], count)
            held = count * case["share_of_data"] * stored_bytes()
            kept = cached(data, memory=round(held))
            ranks = Ranks(global_batch_size=case["step"], share=case["share"])
            torch.manual_seed(1)
            loader = DataLoader(kept, shuffle=True, ranks=ranks)
            own = {index for index in range(count) if loader.owner_of(index) == rank}
            epochs = []
            for _ in range(job["epochs"]):
                before = kept.stats().hits, data.read_bytes
                steps = []
                read_before = kernel_read_bytes()
                for batch in loader:
                    steps.append(batch[:, 0].tolist())
                read_by_kernel = kernel_read_bytes() - read_before
                read = data.read_bytes - before[1]
                # It has also counted the text of /proc/self/io and the steps' store.
                if not read <= read_by_kernel <= read + 65536:
                    raise MeasurementError(
                        f"{read} bytes were read, by the kernel {read_by_kernel}"
                    )
                epochs.append(
                    {
                        "steps": steps,
                        "hits": kept.stats().hits - before[0],
                        "owned": sum(map(own.__contains__, itertools.chain(*steps))),
                        "read_bytes": read,
                    }
                )
            print(json.dumps(epochs), file=out, flush=True)
            dist.barrier()
    dist.destroy_process_group()


def run(job: dict[str, Any], rank_count: int) -> list[list[Any]]:
    """The epochs of each case, of each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_job = {
        "WORLD_SIZE": str(rank_count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are clients of it
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps(job)],
            env={**os.environ, **of_job, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(rank_count)
    ]
    try:
        codes = [rank.wait(timeout=SECONDS_MAX) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    if any(codes):
        raise MeasurementError(f"ranks ended with the exit codes {codes}")
    folder = Path(job["folder"])
    return [
        [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()]
        for rank in range(rank_count)
    ]


def measure(args: argparse.Namespace) -> Iterator[Record]:
    cases = [
        {"step": step, "share": share, "share_of_data": part / args.ranks}
        for step in args.step
        for part in (1, 0.5)
        for share in (None, "by_cache")
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        rows = torch.arange(args.samples)[:, None].expand(-1, SAMPLE_BYTES // 8)
        path.write_bytes(rows.contiguous().numpy().tobytes())
        job = {"folder": folder, "path": str(path), "cases": cases, "samples": args.samples}
        found = run({**job, "epochs": args.epochs}, args.ranks)
    steps: dict[int, Any] = {}
    for number_of_case, case in enumerate(cases):
        of_ranks = [of_rank[number_of_case] for of_rank in found]
        together = [
            [Counter(itertools.chain(*step)) for step in zip(*parts, strict=True)]
            for parts in zip(*([epoch["steps"] for epoch in one] for one in of_ranks), strict=True)
        ]
        if steps.setdefault(case["step"], together) != together:
            raise MeasurementError(f"the steps of {case} have other samples than without share=")
        count = sum(step.total() for step in together[-1])
        last = [one[-1] for one in of_ranks]
        for name, total in (("hits", count), ("owned", count), ("read_bytes", args.samples)):
            parts = [epoch[name] for epoch in last]
            per_sample = SAMPLE_BYTES if name == "read_bytes" else 1
            share = sum(parts) / per_sample / total
            yield summary(f"by_cache/{name}", {**case, "ranks": args.ranks}, [share])


def table(everything: list[Record]) -> str:
    rows = [["step", "budget", "share", "owned", "hits", "read again"]]
    for start in range(0, len(everything), 3):
        hits, owned, read = everything[start : start + 3]
        of = hits["parameters"]
        rows.append(
            [
                number(of["step"]),
                f"1/{round(1 / of['share_of_data'])}",
                of["share"] or "",
                *(f"{one['median']:.3f}" for one in (owned, hits, read)),
            ]
        )
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_options(parser)
    add = parser.add_argument
    add("--rank", type=json.loads, help=argparse.SUPPRESS)
    add("--ranks", type=int, default=8, help="number of ranks (default: 8)")
    add("--samples", type=int, default=16384, help="samples of 4 KiB (default: 16384)")
    add("--step", type=int, nargs="+", default=[256, 1024, 4096], help="samples of a step")
    add("--epochs", type=int, default=4, help="epochs, of which the last one counts (default: 4)")
    add("--quick", action="store_true", help="smoke test with 2 ranks")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.samples, args.step = 2, 256, [64]
    return args


def main() -> int:
    args = parse_arguments()
    if args.rank is not None:
        rank_main(args.rank)
        return 0
    done = report("by_cache", args, measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
