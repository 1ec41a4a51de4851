# SPDX-License-Identifier: Apache-2.0
"""How often a torchrun job resumes after a rank was killed, and which part failed if it did not.

A rank is killed in mid-epoch, once, and torchrun may restart the ranks. They meet again in the
store of the first attempt (torch's default), or in a new one
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). A restart in which the ranks never all meet failed in
torch's rendezvous. A restart that trains has to give the losses of a whole job.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "python"))

RESTARTS = 2
STORES = {"shared": True, "of each attempt": False}
OUTCOMES = ("passed", "failed in torch's rendezvous")


def outcome(folder: Path, wrap: str, world_size: int, is_shared: bool, seconds: float) -> str:
    from torchrun_jobs import steps_of, torchrun

    whole, killed = folder / "whole", folder / "killed"
    if not whole.exists():
        whole.mkdir()
        done = torchrun(whole, world_size, wrap=wrap)
        if done.returncode != 0:
            raise MeasurementError(f"the undisturbed job failed: {done.stderr}")
    killed.mkdir()
    done = torchrun(
        killed,
        world_size,
        restarts=RESTARTS,
        is_store_shared=is_shared,
        seconds_max=seconds,
        wrap=wrap,
        kill=[0, world_size - 1, 2],
    )
    if done.returncode == 0:
        if steps_of(killed, world_size) != steps_of(whole, world_size):
            raise MeasurementError("the losses after the restart differ from an uninterrupted run")
        return OUTCOMES[0]
    attempts = range(1, RESTARTS + 1)
    for attempt in attempts:
        if all((killed / f"joined-{attempt}-{rank}").exists() for rank in range(world_size)):
            raise MeasurementError(f"attempt {attempt} failed after its rendezvous: {done.stderr}")
    return OUTCOMES[1]


def measure(args: argparse.Namespace) -> Iterator[Record]:
    cases = itertools.product(args.wraps, args.ranks)
    for wrap, world_size in cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for turn in range(args.rounds):
                for store, is_shared in STORES.items():
                    print(f"{wrap}, {world_size} ranks, round {turn + 1}, {store}", file=sys.stderr)
                    begin = time.monotonic()
                    seen = outcome(folder, wrap, world_size, is_shared, args.seconds)
                    (folder / "killed").rename(folder / f"killed-{turn}-{is_shared}")
                    parameters = {"wrap": wrap, "ranks": world_size, "store": store}
                    parameters["outcome"] = seen
                    took_s = time.monotonic() - begin
                    yield summary("rank_restarts/seconds", parameters, [took_s])


def table(everything: list[Record]) -> str:
    counts: dict[tuple[str, int, str], Counter[str]] = {}
    for one in (record["parameters"] for record in everything):
        case = one["store"], one["ranks"], one["wrap"]
        counts.setdefault(case, Counter())[one["outcome"]] += 1
    rows = [
        [store, str(ranks), wrap, str(seen.total()), *(str(seen[one]) for one in OUTCOMES)]
        for (store, ranks, wrap), seen in sorted(counts.items())
    ]
    return aligned([["store", "ranks", "model", "attempts", *OUTCOMES], *rows])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    add(
        "--wraps",
        nargs="+",
        default=["ddp", "fsdp2"],
        help="how the model is wrapped (default: ddp fsdp2)",
    )
    add("--rounds", type=int, default=10, help="jobs per case (default: 10)")
    add("--seconds", type=float, default=90.0, help="time limit of a job (default: 90)")
    add("--quick", action="store_true", help="smoke test: one job per store")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.wraps, args.rounds = [2], ["ddp"], 1
    return args


def main() -> int:
    done = report("rank_restarts", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
