# SPDX-License-Identifier: Apache-2.0
"""Builds the fuzz targets and their canaries, shows that the canaries are found, and fuzzes.

A canary is a target whose parser lacks one check. It counts as found when the fuzzer stops at an
input that stops it again, and at which the healthy target does not stop. Needs clang with
libFuzzer, CMake and ninja, and no part of penstock's Python; the target that reads states of
loaders needs torch, too, and is left out where neither this Python nor the project's has one. Exits
with 1 when a canary was not found or a target stopped, and with 77 where the machine lacks the
tools.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
ROOT = SOURCE.parent.parent
COMPILERS = ("clang++-14", "clang++")
# The longest input. Every cap of the fuzz build is reached by a shorter one.
INPUT_BYTES_MAX = 2048
# No input takes 5 s or allocates 16 MB in one piece, unless something is wrong.
INPUT_LIMITS = ("-timeout=5", "-malloc_limit_mb=16")
MEMORY_MB_MAX = 1024
# Beyond the time that libFuzzer was given: starting, and replaying the corpus.
GRACE_SECONDS = 60
# For a number of inputs, without a time limit: this ends a run that hangs.
RUNS_SECONDS_MAX = 1800
NO_TOOLS = 77


@dataclass(frozen=True, slots=True)
class Options:
    """How long to run, in seconds or in inputs (then always the same ones), and where."""

    build: Path
    seconds: int
    canary_seconds: int
    runs: int | None
    jobs: int
    is_only_built: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    ok: bool
    line: str


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of libFuzzer: it ran to its end, or stopped, at an input unless it failed
    itself."""

    went_on: bool
    found: Path | None
    summary: str


def main() -> int:
    options, only = read_options()
    compiler = find_compiler()
    if isinstance(compiler, str):
        print(f"fuzz: {compiler}", file=sys.stderr)
        return NO_TOOLS
    torch = find_torch()
    print(f"== Building the fuzz targets with {compiler}", flush=True)
    if torch is None:
        print("  loader_state is left out: no torch was found; make test installs one", flush=True)
    configure(compiler, torch, options)
    names = [line for line in (options.build / "targets.txt").read_text().splitlines() if line]
    targets = [name for name in names if "/" not in name]
    if unknown := set(only) - set(targets):
        there = ", ".join(targets)
        sys.exit(f"fuzz: there is no target {', '.join(sorted(unknown))}; there are {there}")
    targets = only or targets
    canaries = [name for name in names if "/" in name and name.split("/")[0] in targets]
    build([*targets, *(name.split("/")[1] for name in canaries)], options)
    if options.is_only_built:
        return 0
    for target in targets:
        write_seeds(target, options)
    print(f"== {len(canaries)} canaries, each to be found", flush=True)
    ok = run_all(canaries, hunt_canary, options)
    print(f"== {len(targets)} targets, {how_long(options)} each", flush=True)
    ok = run_all(targets, fuzz, options) and ok
    print("fuzz: " + ("nothing was found" if ok else "FAILED, see above"))
    return 0 if ok else 1


def read_options() -> tuple[Options, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    seconds = int(os.environ.get("FUZZ_SECONDS", "60"))
    add("--seconds", type=int, default=seconds, help="for each target (FUZZ_SECONDS, else 60)")
    add("--canary-seconds", type=int, default=60, help="within which a canary must be found (60)")
    add("--runs", type=int, help="that many inputs, always the same ones, instead of the seconds")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="run at once (CPUs)")
    add("--build", type=Path, default=ROOT / "build" / "fuzz", help="folder for what is made")
    add("--build-only", action="store_true", help="fuzz nothing")
    add("only", nargs="*", metavar="TARGET", help="these targets and their canaries alone")
    got = parser.parse_args()
    options = Options(
        got.build.resolve(),
        got.seconds,
        got.canary_seconds,
        got.runs,
        got.jobs,
        got.build_only,
    )
    return options, got.only


def how_long(options: Options) -> str:
    return f"{options.seconds} s" if options.runs is None else f"{options.runs} inputs"


def find_compiler() -> Path | str:
    """A clang++ that links libFuzzer, or the name of the missing tool."""
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed; try: apt-get install cmake ninja-build"
    for name in COMPILERS:
        if found := shutil.which(name):
            with tempfile.TemporaryDirectory() as folder:
                entry = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) '
                entry += "{ return 0; }"
                command = [found, "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-"]
                command += ["-o", f"{folder}/empty"]
                linked = subprocess.run(command, input=entry, capture_output=True, text=True)
            if linked.returncode == 0:
                return Path(found)
    return (
        f"no {' or '.join(COMPILERS)} that links libFuzzer was found; "
        "try: apt-get install clang-14 libclang-rt-14-dev"
    )


def find_torch() -> Path | None:
    """The folder of the torch that this Python has, or else the project's."""
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    for python in (sys.executable, ROOT / os.environ.get("VENV", ".venv") / "bin" / "python"):
        if shutil.which(python):
            done = subprocess.run([python, "-c", code], capture_output=True, text=True)
            if done.returncode == 0:
                return Path(done.stdout.strip()).parent
    return None


def configure(compiler: Path, torch: Path | None, options: Options) -> None:
    cache = options.build / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={SOURCE}\n" not in cache.read_text():
        shutil.rmtree(options.build)
    command = ["cmake", "-S", SOURCE, "-B", options.build, "-G", "Ninja"]
    run_tool([*command, f"-DCMAKE_CXX_COMPILER={compiler}", f"-DPENSTOCK_TORCH={torch or ''}"])


def build(programs: list[str], options: Options) -> None:
    command = ["cmake", "--build", options.build, "--parallel", str(options.jobs)]
    run_tool([*command, "--target", *programs])


def run_tool(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\nfuzz: {command[0]} failed; its messages are above")


def write_seeds(target: str, options: Options) -> None:
    folder = options.build / "seeds" / target
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_tool([options.build / target, "--write-seeds", folder])


def run_all(names: list[str], run: Callable[[str, Options], Outcome], options: Options) -> bool:
    ok = True
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda name: run(name, options), names):
            print(outcome.line, flush=True)
            ok = ok and outcome.ok
    return ok


def hunt_canary(name: str, options: Options) -> Outcome:
    target, canary = name.split("/")
    with tempfile.TemporaryDirectory() as folder:
        run = run_libfuzzer(canary, target, Path(folder), options.canary_seconds, options)
        if run.found is None:
            return Outcome(False, f"  {target}: canary {canary} was NOT found ({run.summary})")
        if replays_well(options.build / canary, run.found):
            return Outcome(False, f"  {target}: canary {canary} stops only now and then: {run}")
        if not replays_well(options.build / target, run.found):
            kept = keep(run.found, target, options)
            line = f"  {target} itself stops at the input that stops its canary {canary}"
            return Outcome(False, f"{line}\n{replay_lines(target, kept, options)}")
    return Outcome(True, f"  {target}: canary {canary} was found ({run.summary})")


def fuzz(target: str, options: Options) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        run = run_libfuzzer(target, target, Path(folder), options.seconds, options)
        if run.went_on:
            return Outcome(True, f"  {target}: nothing in {run.summary}")
        if run.found is None:
            return Outcome(False, f"  {target}: FAILED ({run.summary})")
        kept = keep(run.found, target, options)
    lines = f"  {target}: STOPPED ({run.summary})\n{replay_lines(target, kept, options)}"
    return Outcome(False, lines)


def run_libfuzzer(program: str, target: str, folder: Path, seconds: int, options: Options) -> Run:
    corpus = folder / "corpus"
    if options.runs is None and program == target:
        corpus = options.build / "corpus" / target  # a later run continues from these findings
    corpus.mkdir(parents=True, exist_ok=True)
    limits = [*INPUT_LIMITS, f"-max_len={INPUT_BYTES_MAX}", f"-rss_limit_mb={MEMORY_MB_MAX}"]
    limits += [f"-artifact_prefix={folder}/", "-print_final_stats=1"]
    amount = [f"-max_total_time={seconds}"]
    seconds_max = seconds + GRACE_SECONDS
    if options.runs is not None:
        amount = [f"-runs={options.runs}", "-seed=1"]
        seconds_max = RUNS_SECONDS_MAX
    log = options.build / "logs" / f"{program}.log"
    log.parent.mkdir(exist_ok=True)
    command = [options.build / program, *limits, *amount]
    command += [corpus, options.build / "seeds" / target]
    with log.open("wb") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=seconds_max)
        except subprocess.TimeoutExpired:
            return Run(False, None, f"it did not end within {seconds_max} s; {log} has more")
    found = [path for path in folder.iterdir() if path.is_file()]
    count = inputs_tried(log)
    if found:
        return Run(False, found[0], f"{reason(found[0])} after {count}")
    if done.returncode != 0:
        return Run(False, None, f"exit status {done.returncode} without an input; see {log}")
    return Run(True, None, count)


def inputs_tried(log: Path) -> str:
    wanted = "stat::number_of_executed_units:"
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(wanted):
            return f"{int(line.removeprefix(wanted)):,} inputs"
    return "an unknown number of inputs"


def reason(found: Path) -> str:
    """The reason in libFuzzer's name of the file: crash, timeout, oom or leak."""
    return found.name.partition("-")[0]


def replays_well(program: Path, found: Path) -> bool:
    command = [program, *INPUT_LIMITS, found]
    return subprocess.run(command, capture_output=True, timeout=GRACE_SECONDS).returncode == 0


def keep(found: Path, target: str, options: Options) -> Path:
    kept = options.build / "found" / f"{target}-{found.name}"
    kept.parent.mkdir(exist_ok=True)
    shutil.copyfile(found, kept)
    return kept


def replay_lines(target: str, kept: Path, options: Options) -> str:
    command = " ".join([str(options.build / target), *INPUT_LIMITS, str(kept)])
    return f"    replay it: {command}\n    what was said: {options.build}/logs/{target}.log"


if __name__ == "__main__":
    sys.exit(main())
