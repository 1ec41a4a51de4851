# SPDX-License-Identifier: Apache-2.0
"""The cost to a running job of strangers who connect to a pool's ports: batches per second without
any, with 10,000 silent connections, with as many that send one byte, and with 1,000 handshakes per
second that are started and abandoned.

The stranger is a separate process on loopback, and has no key. It connects to every port at which
the controller and the workers listen. Also measured: the CPU time of the stranger and of the
servers; how soon a new client is answered, and the memory and the descriptors of controller and
workers, after each window. A worker is the server of `penstock worker`, whose descriptors only root
can see, or one process with all of a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_process
import pool_samples
import process_tree
from figures import (
    MeasurementError,
    Record,
    add_window_options,
    bench_parser,
    log,
    median_interval,
    report,
    run_main,
    summary,
)
from pool_host import PoolError, PoolHost
from table import aligned, by_parameter, metric_cells

HERE = Path(__file__).resolve().parent
KINDS = ("none", "idle", "first_byte", "half_open")
SAMPLES_PER_BATCH = 8
BATCHES_MAX = 10_000_000
END_S_MAX = 10.0
CLIENT_S_MAX = 30.0


class StrangerProcess:
    """A stranger of a kind, while the block runs; none of kind ``none``."""

    def __init__(self, kind: str, ports: list[int], args: argparse.Namespace) -> None:
        self._command = [
            sys.executable, str(HERE / "stranger.py"), kind, "--ports", *map(str, ports),
            "--connections", str(args.connections), "--handshakes", str(args.handshakes),
            "--renew-s", str(args.renew_s),
        ]  # fmt: skip
        self._kind = kind
        self._process: subprocess.Popen[str] | None = None
        self.result: dict[str, float] = {}

    def __enter__(self) -> StrangerProcess:
        if self._kind != "none":
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._process.stdout.readline()  # its start
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            output, _ = self._process.communicate(timeout=END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
        if output:
            self.result = json.loads(output)

    @property
    def cpu_s(self) -> float:
        return 0.0 if self._process is None else one_process.cpu_s(self._process.pid)


class Job:
    """A running job, and the processes that serve it."""

    def __init__(self, host: PoolHost, args: argparse.Namespace) -> None:
        from penstock import DataLoader, Pool

        self._host = host
        self._args = args
        dataset = pool_samples.FromFiles(
            BATCHES_MAX, args.batch_ms / 1e3 / SAMPLES_PER_BATCH, args.values
        )
        self._batches: Iterator[Any] = iter(
            DataLoader(
                dataset,
                batch_size=SAMPLES_PER_BATCH,
                pool=Pool(host.endpoint, keys=host.keys, code_paths=[pool_samples.CODE]),
                timeout=60,
            )
        )
        makers: set[int] = set()
        while len(makers) < len(host.workers):  # until each is useful
            makers.add(int(next(self._batches)["pid"][0]))

    @property
    def servers(self) -> list[int]:
        pids = dict.fromkeys(worker.pid for worker in self._host.workers)
        return [self._host.controller_pid, *pids]

    def take_for(self, seconds: float) -> float:
        """Batches a second."""
        begin = now = time.perf_counter()
        count = 0
        while now < begin + seconds:
            next(self._batches)
            count += 1
            now = time.perf_counter()
        return count / (now - begin)

    def ask(self) -> float:
        """Seconds until a newly connected client has its answer."""
        from penstock import _pool

        begin = time.perf_counter()
        _pool.pool_status(self._host.endpoint, self._host.keys, CLIENT_S_MAX)
        return time.perf_counter() - begin

    def measure(self, kind: str, ports: list[int]) -> dict[str, float]:
        """One window with a kind of stranger."""
        with StrangerProcess(kind, ports, self._args) as stranger:
            self.take_for(self._args.warmup)
            busy_s, own_s = process_tree.machine_busy_s(), self._cpu_s() + stranger.cpu_s
            stranger_s, servers_s = stranger.cpu_s, self._servers_cpu_s()
            begin = time.perf_counter()
            rate = self.take_for(self._args.seconds)
            seconds = time.perf_counter() - begin
            stranger_s, servers_s = stranger.cpu_s - stranger_s, self._servers_cpu_s() - servers_s
            own_s = self._cpu_s() + stranger.cpu_s - own_s
            busy_s = process_tree.machine_busy_s() - busy_s
            client_s = statistics.median(self.ask() for _ in range(self._args.clients))
            for pid in self.servers:
                if not Path(f"/proc/{pid}/status").exists():
                    raise MeasurementError(f"process {pid} of the pool has ended ({kind})")
            found = {
                "batches_per_s": rate,
                "stranger_cores": stranger_s / seconds,
                "servers_cores": servers_s / seconds,
                "new_client_s": client_s,
                "controller_rss_bytes": float(one_process.rss_bytes(self.servers[0])),
                "worker_rss_bytes": float(max(map(one_process.rss_bytes, self.servers[1:]))),
                "fds": float(max(map(one_process.fd_count, self.servers))),
                "foreign_cores": max(0.0, busy_s - own_s) / seconds,
            }
        found |= {
            name: stranger.result.get(name, 0.0)
            for name in ("connects_per_s", "closed_per_s", "open")
        }
        self.take_for(self._args.rest)
        return found

    def _servers_cpu_s(self) -> float:
        return sum(map(one_process.cpu_s, self.servers))

    def _cpu_s(self) -> float:
        pids = {os.getpid(), *self.servers}
        if self._host.supervisor_pid:
            pids.update(process_tree.parents(self._host.supervisor_pid))
        return sum(map(one_process.cpu_s, pids))


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with PoolHost(Path(folder)) as host:
                if args.worker == "command":
                    host.start_command(args.workers)
                else:
                    host.start_workers(args.workers)
                    host.wait_for_workers(args.workers)
                job = Job(host, args)
                ports = [
                    int(address.rpartition(":")[2], 16)
                    for pid in job.servers
                    for address in one_process.listening_addresses(pid)
                ]
                for round_index in range(args.rounds):
                    first = round_index % len(KINDS)
                    turn = KINDS[first:] + KINDS[:first]
                    for kind in turn:
                        found[kind].append(job.measure(kind, ports))
                        log(f"round {round_index + 1}: {kind}: {found[kind][-1]}")
        except PoolError as error:
            raise MeasurementError(str(error)) from error
        except PermissionError as error:
            raise MeasurementError(
                "only root can read the descriptors of controllers and servers; run this as root"
            ) from error
    yield from records(found, args)


def records(found: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> Iterator[Record]:
    parameters = {
        name: getattr(args, name)
        for name in (
            "worker", "workers", "batch_ms", "values", "connections", "renew_s", "handshakes",
            "seconds", "warmup", "rest",
        )
    }  # fmt: skip
    for kind, windows in found.items():
        for metric in windows[0]:
            values = [window[metric] for window in windows]
            yield summary(f"strangers/{metric}", {**parameters, "kind": kind}, values, ndigits=6)
        ratios = [
            window["batches_per_s"] / other["batches_per_s"]
            for window, other in zip(windows, found["none"], strict=True)
        ]
        record = summary("strangers/of_the_rate_without", {**parameters, "kind": kind}, ratios)
        yield record | {"interval": median_interval(ratios)}


COLUMNS = (
    ("batches_per_s", "batches/s", 1.0, "{:.1f}"),
    ("stranger_cores", "CPU cores of the stranger", 1.0, "{:.2f}"),
    ("servers_cores", "of the servers", 1.0, "{:.2f}"),
    ("new_client_s", "new client answered after, ms", 1e3, "{:.1f}"),
    ("connects_per_s", "strangers connect per second", 1.0, "{:.0f}"),
    ("closed_per_s", "closed per second", 1.0, "{:.0f}"),
    ("open", "open at the end", 1.0, "{:.0f}"),
    ("controller_rss_bytes", "controller, MB", 1e-6, "{:.1f}"),
    ("worker_rss_bytes", "largest worker, MB", 1e-6, "{:.1f}"),
    ("fds", "most descriptors", 1.0, "{:.0f}"),
)


def table(everything: list[Record]) -> str:
    rows = [["strangers", "of the rate without", *(title for _, title, _, _ in COLUMNS)]]
    for kind, found in by_parameter(everything, "kind").items():
        ratio = found["of_the_rate_without"]
        low, high = ratio["interval"]
        share = f"{ratio['median']:.3f} ({low:.3f}..{high:.3f})"
        rows.append([kind.replace("_", "-"), share, *metric_cells(found, COLUMNS)])
    return aligned(rows)


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add(
        "--worker",
        choices=("command", "process"),
        default="command",
        help="penstock worker, or a single process",
    )
    add("--workers", type=int, default=2)
    add("--batch-ms", type=float, default=10.0, help="sleep of the worker per batch")
    add("--values", type=int, default=16_384, help="floats in a sample; a batch has 8 samples")
    add("--connections", type=int, default=10_000, help="connections that an idle stranger keeps")
    add("--renew-s", type=float, default=1.0, help="seconds before a closed connection is reopened")
    add(
        "--handshakes",
        type=float,
        default=1000.0,
        help="handshakes per second of a half-open stranger",
    )
    add("--rest", type=float, default=2.0, help="seconds of rest after a stranger")
    add("--clients", type=int, default=5, help="new clients per window")
    add("--quick", action="store_true", help="smoke test with few strangers")
    add_window_options(parser, rounds=9, seconds=5.0, warmup=3.0)
    args = parser.parse_args()
    if args.quick:
        args.connections, args.handshakes, args.rounds = 500, 100.0, 2
        args.seconds, args.warmup, args.rest, args.clients = 1.0, 0.5, 0.2, 1
    return 2 if report("strangers", args, measure_all, table) is None else 0


if __name__ == "__main__":
    run_main(main)
