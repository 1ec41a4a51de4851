# SPDX-License-Identifier: Apache-2.0
"""Compares loaders: the same promises and the same workloads, each system in a separate virtual
environment; writes docs/reference/comparison.md.

The checks are in promises.py and rates.py, the systems in systems.py. A run updates the stored
records, from which the page is written. Systems and parts that a run leaves out keep their records.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

import environments  # noqa: E402
import process_tree  # noqa: E402
import promises  # noqa: E402
import rates  # noqa: E402
from figures import log, run_main  # noqa: E402
from page import page_of  # noqa: E402
from workloads import photographs  # noqa: E402

RECORDS = ROOT / "docs/reference/comparison.json"
QUICK_RECORDS = ROOT / "bench/out/comparison.json"
CONVERTING = ("litdata", "mosaic")
CONVERT_S_MAX = 300.0
BUSY_WINDOW_S = 3.0

Records = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--systems", nargs="+", choices=[*environments.REQUIREMENTS], metavar="SYSTEM",
        default=[*environments.REQUIREMENTS], help="systems to run")  # fmt: skip
    add("--only", choices=("promises", "rates"), help="run one part")
    add("--promises", nargs="+", choices=[*promises.PROMISES], metavar="PROMISE",
        default=[*promises.PROMISES], help="promises to check")  # fmt: skip
    add("--workloads", nargs="+", choices=rates.WORKLOADS, metavar="WORKLOAD",
        default=[*rates.WORKLOADS], help="workloads to measure")  # fmt: skip
    add("--rounds", type=int, default=rates.Plan().rounds, help="windows of a workload")
    add("--quick", action="store_true", help="short windows; records in bench/out")
    add("--page", action="store_true", help="write the page from the stored records, and end")
    folder = ROOT / "build/comparison"
    add("--environments", type=Path, default=folder / "environments", help="folder for them")
    add("--data", type=Path, default=folder / "data", help="folder for the data, which is kept")
    add("--records", type=Path, help="file of the records; the page is written to the same folder")
    args = parser.parse_args(arguments)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the jobs, too
    path: Path = args.records or (QUICK_RECORDS if args.quick else RECORDS)
    records = json.loads(path.read_text()) if path.exists() else {}
    if not args.page:
        command = " ".join(["make comparison", *_shown(arguments)])
        try:
            update(records, args, command)
        finally:
            _store(path, records)
    elif not records:
        parser.error(f"{path} has no records; run without --page first")
    path.with_suffix(".md").write_text(page_of(json.loads(path.read_text())))
    log(f"wrote {path.with_suffix('.md')}")
    return 0


def update(records: Records, args: argparse.Namespace, command: str) -> None:
    """Run the selected systems and parts, and add the results to the records."""
    folder: Path = args.data.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.only != "promises":
        busy_s = process_tree.machine_busy_s()
        time.sleep(BUSY_WINDOW_S)
        foreign_cores = (process_tree.machine_busy_s() - busy_s) / BUSY_WINDOW_S
    run = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "machine": _machine(),
    }
    pythons = _pythons(records, args)
    prepare(records, pythons, folder, args)
    if args.only != "rates":
        for system, python in pythons.items():
            bench = promises.Bench(system, python, folder)
            found = {}
            for name in args.promises:
                _, check = promises.PROMISES[name]
                found[name] = check(bench)
                log(f"{system}: {name}: {found[name]}")
            kept = records.setdefault("promises", {}).get(system, {}).get("values", {})
            records["promises"][system] = {
                "date": run["date"],
                "machine": run["machine"],
                "values": kept | found,
            }
    if args.only != "promises":
        plan = rates.Plan(args.rounds)
        if args.quick:
            plan = rates.Plan(rounds=2, seconds=0.3, warmup=0.2)
        found_rates = list(rates.measure(pythons, folder, args.workloads, plan, log))
        records["rates"] = {
            **run,
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "warmup": plan.warmup,
            "foreign_cores": round(foreign_cores, 2),
            "values": found_rates,
        }


def prepare(
    records: Records, pythons: dict[str, Path], folder: Path, args: argparse.Namespace
) -> None:
    """Write the photographs, and the data in the formats that systems define, once."""
    target = folder / "photographs"
    if not target.exists():
        log("writing the photographs")
        made = folder / "photographs.part"
        made.mkdir()
        photographs.prepare(made, quick=True)
        made.rename(target)
    kinds = [*(promises.CONVERTED if args.only != "rates" else ())]
    kinds += args.workloads if args.only != "promises" else ()
    for system in [name for name in CONVERTING if name in pythons]:
        bench = promises.Bench(system, pythons[system], folder)
        seconds = records.setdefault("conversions", {}).setdefault(system, {})
        for kind in kinds:
            stamp = folder / f"{system}-{kind}.converted"
            if stamp.exists():
                seconds[kind] = float(stamp.read_text())
                continue
            log(f"{system}: converting {kind}")
            outcome = bench.ask("convert", bench.stream_options(kind), CONVERT_S_MAX)
            if outcome.is_complete:
                seconds[kind] = outcome.get("seconds")
                stamp.write_text(str(seconds[kind]))
            else:
                log(f"{system}: converting {kind}: {outcome.error}")


def _pythons(records: Records, args: argparse.Namespace) -> dict[str, Path]:
    """The interpreters of the systems that can be run; the records have why the others cannot."""
    found = {}
    described = records.setdefault("systems", {})
    for system in args.systems:
        try:
            python = environments.python_of(system, args.environments, log)
        except environments.NotInstalledError as error:
            described[system] = {"not_run": str(error)}
            log(f"{system}: not run: {error}")
            continue
        outcome = promises.Bench(system, python, args.data.resolve()).ask("versions", {})
        if outcome.is_complete:
            described[system] = {"versions": outcome.get("versions")}
            found[system] = python
        else:
            described[system] = {"not_run": outcome.error}
            log(f"{system}: not run: {outcome.error}")
    return found


def _machine() -> str:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores ({platform.machine()}), {memory_gib:.0f} GiB, Linux, "
        f"Python {platform.python_version()}"
    )


def _store(path: Path, records: Records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def _shown(arguments: Sequence[str] | None) -> list[str]:
    """The arguments of the command, without the folders of this machine."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    shown = []
    while given:
        argument = given.pop(0)
        if argument in ("--environments", "--data", "--records"):
            given.pop(0)
        else:
            shown.append(argument)
    return [f'ARGS="{" ".join(shown)}"'] if shown else []


if __name__ == "__main__":
    run_main(main)
