# SPDX-License-Identifier: Apache-2.0
"""Programs that train on a device, with torch's loader and with penstock: are the losses
bit-for-bit identical, which operations have moved to the workers, and how many steps per second?

usage: python bench/gpu_programs.py [checks|measures|all] [--device cuda] [--out FOLDER]

The parts are in gpu_checks.py and gpu_measures.py. Each runs in a separate process, prints a line
when it is over, and may fail without the others. The folder gets results.json, results.md and the
files that parts write. The exit status is 1 if a part failed or some result differed from torch's.
With ``--device cpu`` or ``--device simgpu`` (tests/simgpu) and ``--quick`` it shows that the code
runs; the rates are meaningless then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import commit, machine, run_main
from gpu_checks import compiled, frameworks, loaders, pool, styles
from gpu_measures import Options, bits, photographs, prepare_device, rates

HERE = Path(__file__).resolve().parent
CHECKS = {
    "styles": styles,
    "pool": pool,
    "loaders": loaders,
    "frameworks": frameworks,
    "compiled": compiled,
}
MEASURES = {"rates": rates, "photographs": photographs, "bits": bits}
PARTS = {**CHECKS, **MEASURES}
PARTS_OF = {"checks": CHECKS, "measures": MEASURES, "all": PARTS}
# The time limit of a part, in addition to the limit for all of them.
SECONDS_MAX = {"styles": 150, "compiled": 150, "rates": 270, "photographs": 100, "bits": 120}
COLUMNS = ("part", "case", "way", "equal", "steps_per_s", "bytes_per_step", "moved", "note")


class Ended(NamedTuple):
    """The result of one part."""

    name: str
    seconds: float
    rows: list[dict[str, Any]]
    failure: str  # empty if it ran to its end

    @property
    def is_good(self) -> bool:
        return not self.failure and all(row.get("equal") is not False for row in self.rows)

    def line(self) -> str:
        equal = sum(row.get("equal") is True for row in self.rows)
        differing = sum(row.get("equal") is False for row in self.rows)
        left_out = sum("left out" in row.get("note", "") for row in self.rows)
        counts = f"{len(self.rows)} results, {equal} equal to torch's, {differing} not"
        if left_out:
            counts += f", {left_out} left out"
        verdict = "ok" if self.is_good else f"FAILED {self.failure}".rstrip()
        return f"{self.name}: {verdict} ({counts}; {self.seconds:.0f} s)"


def run_part(name: str, args: argparse.Namespace, seconds_max: float) -> Ended:
    """Runs a part in a separate process, with this time limit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows_file, log_file = Path(folder) / "rows", Path(folder) / "log"
        command = [sys.executable, __file__, "--part", name, "--rows", str(rows_file)]
        command += ["--device", args.device, "--out", str(args.out), "--workers", str(args.workers)]
        command += ["--quick"] if args.quick else []
        failure = ""
        with log_file.open("w") as log:
            # A separate process group, so that its workers end with it. Temporary files of pools
            # and compilers are removed with it.
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": folder},
            )
            try:
                status = process.wait(seconds_max)
                if status != 0:
                    failure = f"exited with code {status}"
            except subprocess.TimeoutExpired:
                failure = f"not finished after {seconds_max:.0f} s"
            finally:
                _end_group(process)
        log_text = log_file.read_text(errors="replace")
        (args.out / f"{name}.log").write_text(log_text)
        if failure:
            last = [line for line in log_text.splitlines() if line.strip()][-1:]
            failure += f"; last line of {name}.log: {last[0][:200]}" if last else ""
        lines = rows_file.read_text().splitlines() if rows_file.exists() else []
    rows = [{"part": name, **json.loads(line)} for line in lines]
    return Ended(name, time.monotonic() - began, rows, failure)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def table(ended: list[Ended]) -> str:
    """The results, as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for part in ended:
        for row in part.rows:
            lines.append(f"| {' | '.join(_cell(row.get(name)) for name in COLUMNS)} |")
        if part.failure:
            lines.append(f"| {part.name} | | | FAILED | | | {_cell(part.failure)} |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).replace("|", "/").replace("\n", " ")


def write_results(ended: list[Ended], args: argparse.Namespace, device_name: str) -> None:
    about = {"commit": commit(), "machine": machine(), "device": device_name}
    parts = [
        {"part": part.name, "seconds": round(part.seconds, 1), "failure": part.failure}
        for part in ended
    ]
    rows = [row for part in ended for row in part.rows]
    results = {**about, "quick": args.quick, "parts": parts, "rows": rows}
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    head = "\n".join(f"- {name}: {value}" for name, value in about.items())
    lines = "\n".join(f"- {part.line()}" for part in ended)
    (args.out / "results.md").write_text(f"{head}\n\n{lines}\n\n{table(ended)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("which", nargs="?", choices=tuple(PARTS_OF), default="all")
    add("--only", nargs="+", metavar="PART", choices=sorted(PARTS), help="parts to run")
    add("--device", choices=("cuda", "cpu", "simgpu"), default="cuda", help="default: cuda")
    add("--out", type=Path, help="folder for the results (default: $OUT, else bench/out/gpu)")
    add("--minutes", type=float, default=8.0, help="time limit for all parts (default: 8)")
    add("--workers", type=int, default=0, help="workers per loader (default: CPUs - 4, at most 12)")
    add("--quick", action="store_true", help="smoke test with few, small cases")
    add("--part", help=argparse.SUPPRESS)
    add("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out or Path(os.environ.get("OUT") or HERE / "out" / "gpu")
    cpu_count = len(os.sched_getaffinity(0))
    args.workers = args.workers or max(1, min(12, cpu_count - 4))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch found no CUDA device; use a machine with one, or pass --device cpu or "
            "--device simgpu"
        )
    return args


def main() -> int:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        prepare_device(args.device)
        options = Options(args.device, args.quick, args.workers, args.out)
        with args.rows.open("w") as file:
            for row in PARTS[args.part](options):
                file.write(json.dumps(row) + "\n")
                file.flush()
        return 0
    names = args.only or list(PARTS_OF[args.which])
    until = time.monotonic() + args.minutes * 60
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    ended: list[Ended] = []
    for part in names:
        left_s = until - time.monotonic()
        if left_s < 5:
            ended.append(Ended(part, 0.0, [], f"not run: time limit of {args.minutes:g} minutes"))
        else:
            own_s = left_s if args.quick else SECONDS_MAX.get(part, 90)
            ended.append(run_part(part, args, min(left_s, own_s)))
        print(ended[-1].line(), flush=True)
        write_results(ended, args, name)
    print(f"results written to {args.out}/results.json and results.md")
    return 0 if all(part.is_good for part in ended) else 1


if __name__ == "__main__":
    run_main(main)
