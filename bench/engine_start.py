# SPDX-License-Identifier: Apache-2.0
"""How soon does a job get its first batch from a pool without workers?

For comparison, for each engine: how long the engine takes to start a process that imports torch,
which every pool needs. The pool is to take 2 s more at most. The engines are the ones in the tests:
local processes, real daemons of Slurm, and a real Ray cluster where Ray is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Record, add_report_options, report, summary

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "python"))

ENGINES = ("local", "slurm", "ray")
POLL_S = 0.005
LIMIT_S = 120.0


class ImportCommand:
    """In place of a worker's command: imports torch, and makes a file."""

    def __init__(self, path: Path) -> None:
        self._program = f"import torch; open({str(path)!r}, 'w').close()"

    def arguments(self) -> list[str]:
        return [sys.executable, "-c", self._program]


def engine_of(title: str, pool: Any, command: Any, prefix: str) -> Any:
    if title == "local":
        from penstock.engines.local_engine import LocalEngine

        return LocalEngine(command, prefix, pool.state / "imports")
    if title == "slurm":
        from penstock.engines.slurm_engine import SlurmEngine

        return SlurmEngine(command, prefix, pool.state / "imports", partition="harvest")
    from penstock.engines.ray_engine import RayEngine

    return RayEngine(command, prefix, address=pool.address, resources={"dataworker": 1})


def import_s(title: str, pool: Any, number: int) -> float:
    path = pool.state / f"imported-{number}"
    prefix = f"pk-{number}-"
    engine = engine_of(title, pool, ImportCommand(path), prefix)
    engine.workers()  # connects
    begun = time.monotonic()
    engine.spawn([f"{prefix}1"])
    while not path.exists():
        if time.monotonic() - begun > LIMIT_S:
            raise TimeoutError(f"the engine {title} started no process within {LIMIT_S:g} s")
        time.sleep(POLL_S)
    took = time.monotonic() - begun
    while engine.workers():
        time.sleep(0.1)
    return took


def first_batch_s(pool: Any) -> float:
    loader = pool.loader(8, 0.0)
    begun = time.monotonic()
    for _ in loader:
        took = time.monotonic() - begun
        break
    pool.has_workers(0)
    return took


def measure(args: argparse.Namespace) -> Iterator[Record]:
    import pytest
    from engine_pools import POOLS

    for title in args.only or ENGINES:
        if title == "ray" and importlib.util.find_spec("ray") is None:
            print("ray is not installed: skipped", file=sys.stderr)
            continue
        with (
            tempfile.TemporaryDirectory(prefix="pk") as name,
            pytest.MonkeyPatch.context() as patch,
        ):
            pool = POOLS[title](Path(name), patch)
            try:
                pool.up("--max", "1", "--idle", "0")
                imports, firsts = [], []
                for number in range(args.rounds):
                    imports.append(import_s(title, pool, number))
                    firsts.append(first_batch_s(pool))
                    print(f"{title}: {imports[-1]:.2f} s, {firsts[-1]:.2f} s", file=sys.stderr)
            finally:
                pool.close()
        beyond = [first - imported for imported, first in zip(imports, firsts, strict=True)]
        yield summary(f"engine_start/{title}/import_torch_s", {}, imports)
        yield summary(f"engine_start/{title}/first_batch_s", {}, firsts)
        yield summary(f"engine_start/{title}/beyond_s", {}, beyond)


def render(records: list[Record]) -> str:
    rows = [
        "| engine | start of a process that imports torch | first batch without running workers "
        "| excess, by round |",
        "| --- | ---: | ---: | ---: |",
    ]
    found = {record["name"]: record for record in records}
    for title in ENGINES:
        names = [
            f"engine_start/{title}/{what}_s" for what in ("import_torch", "first_batch", "beyond")
        ]
        if names[0] in found:
            cells = [
                f"{one['median']:.2f} s ({one['p10']:.2f}..{one['p90']:.2f})"
                for one in map(found.__getitem__, names)
            ]
            rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    add_report_options(parser)
    args = parser.parse_args()
    return 0 if report("engine_start.py", args, measure, render) is not None else 2


if __name__ == "__main__":
    sys.exit(main())
