# SPDX-License-Identifier: Apache-2.0
"""The bytes that cross to a machine whose ranks need the same batches, with ``replica_group`` and
without.

Two network namespaces are the machines: on one are a pool's workers, on the other the ranks of one
group. All ranks read the same order. The bytes received by the ranks' machine are counted.
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
from replica_rank import BATCH_SIZE, SHAPE, STEP_COUNT
from shaped_link import POOL_ADDRESS, NoLinkError, ShapedLink

RANK = Path(__file__).with_name("replica_rank.py")
EPOCH_BYTES = STEP_COUNT * BATCH_SIZE * math.prod(SHAPE) * 4
SECONDS_MAX = 300


def received_bytes(link: ShapedLink) -> int:
    command = ["ip", "-n", link.trainer_side, "-j", "-s", "link", "show", link.device]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count: int = json.loads(done.stdout)[0]["stats64"]["rx"]["bytes"]
    return count


def run_ranks(link: ShapedLink, pool: PoolHost, rank_count: int, shares: bool) -> dict[str, Any]:
    given = {"pool": pool.endpoint, "keys": pool.keys}
    if shares:
        given["group"] = list(range(rank_count))
    before = received_bytes(link)
    ranks = [
        subprocess.Popen(
            [*link.enter(link.trainer_side), sys.executable, str(RANK), json.dumps(given)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(rank_count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29501",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(rank_count)
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
    return figures | {"bytes": received_bytes(link) - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--rate", default="10gbit", help="rate of the simulated cable, in the format of tc"
    )
    args = parser.parse_args()
    print(f"{EPOCH_BYTES / 1e6:.0f} MB of batches, {args.workers} workers, {args.rate}\n")
    print("| ranks | shared batches | MB received | multiple of the batches | seconds |")
    print("| --- | --- | --- | --- | --- |")
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ShapedLink(args.rate) as link,
            PoolHost(Path(folder), address=POOL_ADDRESS, prefix=link.enter(link.pool_side)) as pool,
        ):
            pool.start_workers(args.workers)
            for rank_count in args.ranks:
                rounds = [
                    {shares: run_ranks(link, pool, rank_count, shares) for shares in (False, True)}
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
    except NoLinkError as error:
        raise SystemExit(f"network namespaces are not available: {error}") from error


if __name__ == "__main__":
    main()
