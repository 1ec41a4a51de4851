# SPDX-License-Identifier: Apache-2.0
"""The bytes that cross to a machine whose ranks need the same batches, with ``replica_group`` and
without.

Two network namespaces are the machines: on one are a pool's workers, on the other the ranks of one
group. All ranks read the same order. The bytes received by the ranks' machine are counted. Then 4
ranks are on separate machines on a switch, or on the ``--machines``, and read the ``--leaves``. By
default, these are measured with and without a machine that reads all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pool_host import PoolHost
from replica_rank import BATCH_SIZE, LABELS, SHAPE, STEP_COUNT
from shaped_link import (
    POOL_ADDRESS,
    NoLinkError,
    ShapedLink,
    ShapedSwitch,
    inside,
    received_bytes,
)

RANK = Path(__file__).with_name("replica_rank.py")
EPOCH_BYTES = STEP_COUNT * BATCH_SIZE * math.prod(SHAPE) * 4
LEAVES: list[dict[str, list[int]]] = [
    {"pixels": [0, 1], "labels": [3]},
    {"pixels": [0, 3], "labels": [3]},  # the machine of rank 3 reads all
]
SECONDS_MAX = 300


def run_ranks(places: list[str], master: str, device: str, given: dict[str, Any]) -> dict[str, Any]:
    """The figures of rank 0, once all ranks have ended, of which rank r runs in ``places[r]``.

    They find each other at the address ``master``, and gloo connects them through ``device``.
    """
    ranks = [
        subprocess.Popen(
            [*inside(place), sys.executable, str(RANK), json.dumps(given)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": master,
                "MASTER_PORT": "29501",
                "GLOO_SOCKET_IFNAME": device,
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(places)
    ]
    try:
        texts = [rank.communicate(timeout=SECONDS_MAX)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; see above")
    figures: dict[str, Any] = json.loads(texts[0])
    return figures


def measure_one_machine(args: argparse.Namespace) -> None:
    print(f"{EPOCH_BYTES / 1e6:.0f} MB of batches, {args.workers} workers, {args.rate}\n")
    print("| ranks | shared batches | MB received | multiple of the batches | seconds |")
    print("| --- | --- | --- | --- | --- |")
    with (
        tempfile.TemporaryDirectory() as folder,
        ShapedLink(args.rate) as link,
        PoolHost(Path(folder), address=POOL_ADDRESS, prefix=inside(link.pool_side)) as pool,
    ):
        pool.start_workers(args.workers)

        def run(rank_count: int, shares: bool) -> dict[str, Any]:
            given: dict[str, Any] = {"pool": pool.endpoint, "keys": pool.keys}
            if shares:
                given["group"] = list(range(rank_count))
            before = received_bytes(link.trainer_side, link.device)
            figures = run_ranks([link.trainer_side] * rank_count, "127.0.0.1", "lo", given)
            return figures | {"bytes": received_bytes(link.trainer_side, link.device) - before}

        for rank_count in args.ranks:
            rounds = [
                {shares: run(rank_count, shares) for shares in (False, True)}
                for _ in range(args.rounds)
            ]
            for shares in (False, True):
                sizes = [each[shares]["bytes"] for each in rounds]
                seconds = [each[shares]["seconds"] for each in rounds]
                size = statistics.median(sizes)
                print(
                    f"| {rank_count} | {'yes' if shares else 'no'} | {size / 1e6:.0f} | "
                    f"{size / EPOCH_BYTES:.2f} | {statistics.median(seconds):.1f} "
                    f"({min(seconds):.1f} to {max(seconds):.1f}) |",
                    flush=True,
                )


def measure_leaves(args: argparse.Namespace) -> None:
    machine_of = {rank: n for n, ranks in enumerate(args.machines) for rank in ranks}
    rank_count = len(machine_of)
    sizes = {"pixels": EPOCH_BYTES, "labels": STEP_COUNT * BATCH_SIZE * LABELS * 8}
    with (
        tempfile.TemporaryDirectory() as folder,
        ShapedSwitch(args.rate, len(args.machines)) as switch,
        PoolHost(
            Path(folder),
            address=switch.addresses[switch.pool_side],
            prefix=inside(switch.pool_side),
        ) as pool,
    ):
        pool.start_workers(args.workers)
        machines = switch.trainer_sides
        places = [machines[machine_of[rank]] for rank in range(rank_count)]

        def run(leaves: dict[str, list[int]] | None) -> list[Any]:
            given = {"pool": pool.endpoint, "keys": pool.keys, "group": list(range(rank_count))}
            given |= {"has_labels": True, "leaves": leaves}
            before = [received_bytes(machine, switch.device) for machine in machines]
            figures = run_ranks(places, switch.addresses[places[0]], switch.device, given)
            after = [received_bytes(machine, switch.device) for machine in machines]
            return [figures["seconds"], *(b - a for a, b in zip(before, after, strict=True))]

        rounds = [[run(leaves) for leaves in (None, *args.leaves)] for _ in range(args.rounds)]
    whole, *divided = ([*zip(*each, strict=True)] for each in zip(*rounds, strict=True))
    for leaves, figures in zip(args.leaves, divided, strict=True):
        print_leaves(args.machines, leaves, sizes, whole, figures)


def print_leaves(
    machines: list[list[int]],
    leaves: dict[str, list[int]],
    sizes: dict[str, int],
    whole: list[Any],
    divided: list[Any],
) -> None:
    """Print a table; ``whole`` and ``divided`` have the figures of each round: the seconds, and
    the bytes of each machine."""
    print(f"\nleaves={leaves}")
    print("| machine with ranks | reads | MB of these | MB received with leaves | multiple "
          "| MB received without |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- |")
    for number, ranks in enumerate(machines):
        read = [name for name in sizes if set(ranks) & {*leaves.get(name, ranks)}]
        wanted = sum(sizes[name] for name in read)
        received = statistics.median(divided[number + 1])
        multiple = f"{received / wanted:.2f}" if wanted else "-"
        print(
            f"| {', '.join(map(str, ranks))} | {' and '.join(read) or 'neither'} | "
            f"{wanted / 1e6:.0f} | {received / 1e6:.1f} | {multiple} | "
            f"{statistics.median(whole[number + 1]) / 1e6:.1f} |"
        )
    for words, seconds in (("with", divided[0]), ("without", whole[0])):
        print(f"Seconds {words} leaves: {statistics.median(seconds):.1f} "
              f"({min(seconds):.1f} to {max(seconds):.1f})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--rate", default="10gbit", help="rate of the simulated cable, in the format of tc"
    )
    parser.add_argument("--only", choices=["machine", "leaves"], help="measure one of the tables")
    parser.add_argument(
        "--leaves",
        type=json.loads,
        nargs="+",
        default=LEAVES,
        help='ranks that read "pixels" and "labels", as JSON: \'{"pixels": [0], "labels": [1]}\'',
    )
    parser.add_argument(
        "--machines",
        type=json.loads,
        default=[[0], [1], [2], [3]],
        help="the ranks of each machine, as JSON: '[[0, 1], [2, 3]]'",
    )
    args = parser.parse_args()
    try:
        if args.only != "leaves":
            measure_one_machine(args)
        if args.only != "machine":
            measure_leaves(args)
    except NoLinkError as error:
        raise SystemExit(f"network namespaces are not available: {error}") from error


if __name__ == "__main__":
    main()
