# SPDX-License-Identifier: Apache-2.0
"""The cost of a pool as a job gets more ranks.

The workers stay the same; the ranks take their shares of one order. Of 2 to 8 ranks each is a
separate process. 64 are simulated by one process with 64 loaders, each with separate connections.
The costs are the CPU time of the controller, and the steps that the job makes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from pool_host import PoolHost

from penstock import DataLoader, Pool, Ranks

SECONDS = 10.0
SAMPLE_BYTES = 4096


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SAMPLE_BYTES // 4,), float(index))


def read(pool: str, keys: str, rank: int, world_size: int, end: threading.Event) -> int:
    loader = DataLoader(
        Rows(),
        batch_size=32,
        ranks=Ranks(rank=rank, world_size=world_size),
        pool=Pool(pool, keys=keys),
    )
    count = 0
    for _ in loader:
        count += 1
        if end.is_set():
            break
    return count


def run_rank_threads(given: dict[str, Any]) -> None:
    """Reads as these ranks until a line arrives, and prints how many batches each has had."""
    end = threading.Event()
    counts: dict[int, int] = {}

    def run_rank(rank: int) -> None:
        counts[rank] = read(given["pool"], given["keys"], rank, given["world_size"], end)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in given["ranks"]]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    end.set()
    for thread in threads:
        thread.join(30)
    print(json.dumps([counts.get(rank, 0) for rank in given["ranks"]]), flush=True)
    os._exit(0)  # ranks without a worker wait in next()


def measure(pool: PoolHost, world_size: int, process_count: int) -> dict[str, float]:
    ranks = [list(range(n, world_size, process_count)) for n in range(process_count)]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + world_size),  # one job to the pool
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--ranks-of"),
                json.dumps(
                    {
                        "pool": pool.endpoint,
                        "keys": pool.keys,
                        "ranks": mine,
                        "world_size": world_size,
                    }
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for mine in ranks
    ]
    controller = psutil.Process(pool.controller_pid)
    try:
        time.sleep(8.0 + 0.5 * process_count)  # all of them train by then
        before = controller.cpu_times()
        begun = time.monotonic()
        time.sleep(SECONDS)
        after, passed = controller.cpu_times(), time.monotonic() - begun
        cpu_s = after.user + after.system - before.user - before.system
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        counts = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
        served = [count for of_process in counts for count in of_process if count > 0]
        return {
            "cpu_ms_per_s": 1000 * cpu_s / passed,
            "memory_mb": controller.memory_info().rss / 1e6,
            "served": len(served),
        }
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-of", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.ranks_of:
        return run_rank_threads(json.loads(args.ranks_of))
    print("| ranks | processes | ranks with a worker | controller, CPU ms per second | MB |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, PoolHost(Path(folder)) as pool:
        pool.start_workers(args.workers)
        pool.wait_for_workers(args.workers)
        for world_size, process_count in [(1, 1), (2, 2), (4, 4), (8, 8), (64, 1)]:
            rounds = [measure(pool, world_size, process_count) for _ in range(args.rounds)]
            cpu = [each["cpu_ms_per_s"] for each in rounds]
            print(
                f"| {world_size} | {process_count} | "
                f"{statistics.median(each['served'] for each in rounds):.0f} | "
                f"{statistics.median(cpu):.1f} ({min(cpu):.1f} to {max(cpu):.1f}) | "
                f"{statistics.median(each['memory_mb'] for each in rounds):.0f} |",
                flush=True,
            )
    return None


if __name__ == "__main__":
    main()
