# SPDX-License-Identifier: Apache-2.0
"""One loader with a pool, whose batches are ready: their rate, and its cost for each process.
bench/pool_transport.py starts this and reads the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import one_process
import pool_samples
import process_tree
import torch

from penstock import DataLoader, Pool

BATCHES_MIN = 24
EPOCH_BATCHES = 1_000_000


def measure(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    loader = DataLoader(
        pool_samples.Ready(EPOCH_BATCHES, args.bytes),
        batch_size=None,
        pool=Pool(args.pool, keys=args.keys, code_paths=[pool_samples.CODE]),
        timeout=60,
    )
    batches = iter(loader)
    warm = time.perf_counter() + args.warmup
    for _ in _until(batches, warm, len(args.workers)):
        pass
    link_before = link_bytes(args.link)
    before, faults = cpu_of_all(args), one_process.minor_faults(os.getpid())
    busy_s = process_tree.machine_busy_s()
    begin = time.perf_counter()
    batch_count = sum(1 for _ in _until(batches, begin + args.seconds, len(args.workers)))
    seconds = time.perf_counter() - begin
    busy_s = process_tree.machine_busy_s() - busy_s
    faults = one_process.minor_faults(os.getpid()) - faults
    used = {name: after - before[name] for name, after in cpu_of_all(args).items()}
    moved = link_bytes(args.link) - link_before
    gigabytes = batch_count * args.bytes / 1e9
    result = {
        "gb_per_s": gigabytes / seconds,
        "batches_per_s": batch_count / seconds,
        "cpu_s_per_gb": (used["trainer"] + used["workers"]) / gigabytes,
        "trainer_cpu_s_per_gb": used["trainer"] / gigabytes,
        "worker_cpu_s_per_gb": used["workers"] / gigabytes,
        "controller_cpu_s_per_gb": used["controller"] / gigabytes,
        "trainer_faults": faults / batch_count,
        "foreign_cores": max(0.0, busy_s - sum(used.values())) / seconds,
    }
    if args.link:
        result["link_gbit_per_s"] = moved * 8 / 1e9 / (time.perf_counter() - begin)
    return result


def cpu_of_all(args: argparse.Namespace) -> dict[str, float]:
    return {
        "trainer": one_process.cpu_s(os.getpid()),
        "workers": sum(one_process.cpu_s(pid) for pid in args.workers),
        "controller": one_process.cpu_s(args.controller),
    }


def link_bytes(link: str) -> int:
    """The bytes sent through the queue of a link, NAMESPACE:DEVICE, with the headers of Ethernet,
    IP and TCP. The counters of the device leave out the headers that it makes itself when it cuts a
    packet.
    """
    if not link:
        return 0
    namespace, _, device = link.partition(":")
    command = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device, "root"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)[0]["bytes"])


def _until(batches: Iterator[Any], end: float, turn: int) -> Iterator[None]:
    """Takes batches until the time is over, and drops each for the next. As many batches as workers
    make a turn, after which as much is in flight as before it: whole turns are taken.
    """
    count = 0
    while count < BATCHES_MIN or count % turn != 0 or time.perf_counter() < end:
        next(batches)
        count += 1
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--pool", required=True)
    add("--keys", required=True)
    add("--controller", type=int, required=True, help="pid of the controller")
    add("--workers", type=int, nargs="+", required=True, help="pids of the workers")
    add("--bytes", type=int, required=True, help="bytes per batch")
    add("--seconds", type=float, default=3.0)
    add("--warmup", type=float, default=2.0)
    add("--link", default="", metavar="NAMESPACE:DEVICE", help="link that carries the batches")
    print(json.dumps(measure(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
