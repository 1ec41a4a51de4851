# SPDX-License-Identifier: Apache-2.0
"""Subjects live pools to the faults of production: kills, stops, cuts and starves their processes
while streams run, and compares every batch with the batch of a single process.

    python tests/chaos/chaos.py
    python tests/chaos/chaos.py --only kill-workers --seed 4711

Needs an installed penstock. Scenarios that take root or missing tools are skipped, with a message.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(TESTS / "contract"), str(TESTS / "python")]

from outcomes import Outcome, findings, table  # noqa: E402
from scenarios import SCENARIOS, run_scenario  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="of random choices; every run prints its own")
    parser.add_argument(
        "--only", action="append", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS)
    )
    parser.add_argument("--faults", type=int, metavar="N", help="of each scenario")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        default=(),
        help="of each `penstock worker`, where servers or jobs are killed or stopped (drawn)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="for the table, as Markdown")
    args = parser.parse_args()
    seed = random.randrange(2**31) if args.seed is None else args.seed
    print(f"seed: {seed}", flush=True)
    outcomes: list[Outcome] = []
    # Short, as sockets in it have names of at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="chaos.", dir="/tmp") as folder:
        for number, name in enumerate(args.only or SCENARIOS):
            print(name, flush=True)
            place = Path(folder) / str(number)
            outcomes.append(
                run_scenario(
                    name, place, seed=seed, fault_count=args.faults, worker_counts=args.workers
                )
            )
            print(f"  {outcomes[-1].seconds:.0f} s", flush=True)
            if args.report:
                args.report.write_text(table(outcomes) + "\n")
    print(table(outcomes))
    wrong = findings(outcomes)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
