# SPDX-License-Identifier: Apache-2.0
"""The way of a batch from a pool worker to its trainer, against the sockets on that way.

A round is, for one size of batch and one after the other: a raw TCP socket, ZeroMQ without keys,
ZeroMQ with CURVE, a pool's data connection and its seal alone (bench/micro_pool_transport.cpp, in
random order), then a loader with a pool whose worker has its batches ready. Ratios are taken within
a round. The case ``link`` runs the loader across two network namespaces, over a link of 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shaped_link
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

HERE = Path(__file__).resolve().parent
SIZES = {"4MB": 4 << 20, "38MB": 64 * 3 * 224 * 224 * 4}
CASES = (*SIZES, "link")
KINDS = {
    "BM_PoolRaw": "raw",
    "BM_PoolRawCopied": "raw_copied",
    "BM_PoolZmq": "zmq",
    "BM_PoolCurve": "curve",
    "BM_PoolSockets": "pool_sockets",
    "BM_PoolSeal": "seal",
}
MICRO_METRICS = ("cpu_s_per_gb", "receiver_cpu_s_per_gb", "receiver_faults")
LINK_GBIT = 1.0
# The bytes of an Ethernet frame of 1,514 that a TCP connection with time stamps has for its data.
LINK_SHARE_MAX = 1448 / 1514

Round = dict[str, dict[str, float]]  # kind -> metric -> value

# name, of which metric, over, the demand, and whether more is better
RATIOS = (
    ("zmq", "gb_per_s", "raw", 0.7, True),
    ("zmq", "gb_per_s", "raw_copied", 0.95, True),
    ("zmq", "cpu_s_per_gb", "raw", 1.6, False),
    ("zmq", "cpu_s_per_gb", "raw_copied", 1.3, False),
    ("pool_sockets", "gb_per_s", "curve", 2.5, True),
    ("pool_sockets", "cpu_s_per_gb", "curve", 0.5, False),
    ("pool_sockets", "gb_per_s", "zmq", 0.7, True),
    ("loader", "gb_per_s", "pool_sockets", 0.9, True),
    ("loader", "cpu_s_per_gb", "pool_sockets", None, False),
)


def default_micro() -> Path:
    show = [sys.executable, "setup.py", "-q", "native", "--show-folder"]
    done = subprocess.run(show, cwd=HERE.parent, check=True, capture_output=True, text=True)
    return HERE.parent / done.stdout.strip() / "bench" / "micro"


def run_micro(size: int, args: argparse.Namespace) -> Round:
    command = [
        str(args.micro),
        f"--benchmark_filter=^BM_Pool.*/bytes:{size}/",
        f"--benchmark_min_time={args.socket_seconds}",
        "--benchmark_enable_random_interleaving=true",
        "--benchmark_format=json",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(
            f"{args.micro} cannot be run: {error}; `make bench` builds it"
        ) from error
    if done.returncode != 0:
        raise MeasurementError(
            f"{args.micro} exited with code {done.returncode}: {done.stderr[-1000:]}"
        )
    found: Round = {}
    for one in json.loads(done.stdout)["benchmarks"]:
        if one.get("error_occurred"):
            raise MeasurementError(f"{one['name']}: {one['error_message']}")
        rate = {"gb_per_s": one["bytes_per_second"] / 1e9}
        metrics = {name: one[name] for name in MICRO_METRICS if name in one}
        found[KINDS[one["name"].partition("/")[0]]] = rate | metrics
    return found


def run_loader(
    host: PoolHost, size: int, args: argparse.Namespace, *, prefix: list[str], link: str = ""
) -> dict[str, float]:
    command = [*prefix, sys.executable, str(HERE / "pool_rate.py"), "--pool", host.endpoint]
    command += ["--keys", host.keys, "--controller", str(host.controller_pid)]
    command += ["--workers", *(str(worker.pid) for worker in host.workers)]
    seconds = args.link_seconds if link else args.seconds
    command += ["--bytes", str(size), "--seconds", str(seconds)]
    command += ["--warmup", str(args.warmup), *(["--link", link] if link else [])]
    limit_s = 120 + 10 * (seconds + args.warmup)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"the loader took over {limit_s:.0f} s") from error
    if done.returncode != 0:
        raise MeasurementError(
            f"the loader exited with code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_size(case: str, host: PoolHost, args: argparse.Namespace) -> Iterator[Record]:
    rounds: list[Round] = []
    for index in range(args.rounds):
        log(f"{case}: round {index + 1} of {args.rounds}")
        found = {} if args.loader_only else run_micro(SIZES[case], args)
        found["loader"] = run_loader(host, SIZES[case], args, prefix=[])
        rounds.append(found)
    yield from records(case, rounds, {"batch_bytes": SIZES[case], "workers": 1})


def measure_link(args: argparse.Namespace) -> Iterator[Record]:
    rate = f"{LINK_GBIT:g}gbit"
    with tempfile.TemporaryDirectory() as folder, shaped_link.ShapedLink(rate) as link:
        inside = link.enter(link.pool_side)
        with PoolHost(Path(folder), address=shaped_link.POOL_ADDRESS, prefix=inside) as host:
            host.start_workers(args.link_workers)
            host.wait_for_workers(args.link_workers)
            for name, size in SIZES.items():
                rounds: list[Round] = []
                for index in range(args.rounds):
                    log(f"link, {name}: round {index + 1} of {args.rounds}")
                    found = run_loader(
                        host,
                        size,
                        args,
                        prefix=link.enter(link.trainer_side),
                        link=f"{link.pool_side}:{link.device}",
                    )
                    found["of_line"] = found["gb_per_s"] * 8 / LINK_GBIT
                    found["of_tcp"] = found["of_line"] / LINK_SHARE_MAX
                    rounds.append({"loader": found})
                parameters = {"batch_bytes": size, "workers": args.link_workers, "rate": rate}
                yield from records(f"link-{name}", rounds, parameters)


def records(case: str, rounds: list[Round], parameters: dict[str, Any]) -> Iterator[Record]:
    for kind, metrics in rounds[0].items():
        for metric in metrics:
            values = [one[kind][metric] for one in rounds]
            name = f"pool_transport/{case}/{metric}"
            yield summary(name, {**parameters, "kind": kind}, values, ndigits=6)
    for kind, metric, over, demand, is_more_better in RATIOS:
        if kind in rounds[0] and over in rounds[0]:
            values = [one[kind][metric] / one[over][metric] for one in rounds]
            own = {**parameters, "kind": kind, "over": over, "of": metric}
            record = summary(f"pool_transport/{case}/ratio", own, values)
            record["interval"] = median_interval(values)
            record["demand"], record["is_more_better"] = demand, is_more_better
            yield record


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    cases = args.only or CASES
    try:
        if sizes := [case for case in cases if case in SIZES]:
            with tempfile.TemporaryDirectory() as folder, PoolHost(Path(folder)) as host:
                host.start_workers(1)
                host.wait_for_workers(1)
                for case in sizes:
                    yield from measure_size(case, host, args)
        if "link" in cases:
            yield from measure_link(args)
    except PoolError as error:
        raise MeasurementError(str(error)) from error
    except shaped_link.NoLinkError as error:
        if "link" in args.only:
            raise MeasurementError(f"link: {error}; run it as root") from error
        log(f"link is skipped: {error}")


def table(everything: list[Record]) -> str:
    rows = [
        "| batches | | GB/s | CPU-s per GB, both ends | receiver | faults per batch, receiver |",
        "|" + " --- |" * 6,
    ]
    ratios = [
        "| case | ratio | of | measured | 95% interval | required | verdict |",
        "|" + " --- |" * 7,
    ]
    links = [
        "| batch | on the line, Gbit/s | batches, GB/s | of 1 Gbit/s "
        "| of the TCP payload maximum | CPU-s per GB, both ends |",
        "|" + " --- |" * 6,
    ]
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in everything:
        _, case, metric = record["name"].split("/")
        if metric == "ratio":
            ratios.append(_ratio_row(case, record))
        else:
            found.setdefault((case, record["parameters"]["kind"]), {})[metric] = record
    for (case, kind), metrics in found.items():
        if case.startswith("link-"):
            columns = ("link_gbit_per_s", "gb_per_s", "of_line", "of_tcp", "cpu_s_per_gb")
            cells = [_spread(metrics.get(column)) for column in columns]
            links.append("| " + " | ".join([case.removeprefix("link-"), *cells]) + " |")
            continue
        receiver = metrics.get("receiver_cpu_s_per_gb") or metrics.get("trainer_cpu_s_per_gb")
        faults = metrics.get("receiver_faults") or metrics.get("trainer_faults")
        cells = [case, kind, _spread(metrics["gb_per_s"]), _spread(metrics["cpu_s_per_gb"]),
                 _spread(receiver), _spread(faults)]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n\n".join("\n".join(part) for part in (rows, ratios, links) if len(part) > 2)


def _spread(record: Record | None) -> str:
    if record is None:
        return ""
    return f"{record['median']:.3g} ({record['p10']:.3g}..{record['p90']:.3g})"


def _ratio_row(case: str, record: Record) -> str:
    parameters, demand = record["parameters"], record["demand"]
    low, high = record["interval"]
    wanted = verdict = ""
    if demand is not None:
        wanted = f"{'>=' if record['is_more_better'] else '<='} {demand:g}"
        is_met = (
            record["median"] >= demand if record["is_more_better"] else record["median"] <= demand
        )
        verdict = "met" if is_met else "open" if low <= demand <= high else "MISSED"
    of = {"gb_per_s": "rate", "cpu_s_per_gb": "CPU"}[parameters["of"]]
    return (
        f"| {case} | {parameters['kind']} / {parameters['over']} | {of} | {record['median']:.2f} "
        f"| {low:.2f}..{high:.2f} | {wanted} | {verdict} |"
    )


def main() -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=CASES, default=[], help="cases to measure")
    add("--link-seconds", type=float, default=8.0, help="seconds of a measurement over the link")
    add("--socket-seconds", type=float, default=0.5, help="minimum seconds of a socket measurement")
    add("--link-workers", type=int, default=2, help="workers at the other end of the link")
    add("--loader-only", action="store_true", help="skip the sockets of the C++ program")
    add("--micro", type=Path, default=default_micro(), help="path of the C++ benchmarks")
    add("--quick", action="store_true", help="smoke test: one short round")
    add_window_options(parser, rounds=7, seconds=3.0, warmup=2.0)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.warmup, args.socket_seconds = 1, 0.3, 0.1, 0.01
        args.link_seconds = 0.3
    return 2 if report("pool_transport", args, measure_all, table) is None else 0


if __name__ == "__main__":
    run_main(main)
