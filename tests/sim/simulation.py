# SPDX-License-Identifier: Apache-2.0
"""Builds the simulator of the pool's protocol and runs it over many seeds, on every core.

    python3 tests/sim/simulation.py --seeds 200000
    python3 tests/sim/simulation.py --replay 4711

Needs only a C++20 compiler. A build may have bugs put into its copy of csrc/session and
csrc/scheduling (mutants.py), which shows that the simulator finds them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
ROOMS = ("session", "scheduling")  # which are compiled
HEADER_ROOMS = ("base", "wire")
HEADERS = ("server/maker.h",)  # of other rooms
BUILT = HERE.parent.parent / "build" / "simulator"
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-restrict", "-D_GLIBCXX_ASSERTIONS")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One place of ROOMS, or of HEADERS, that is replaced."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Outcome:
    failed: int
    said: str


class BuildError(Exception):
    """The compiler's words."""


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def build(folder: Path, mutations: Sequence[Mutation] = (), sound: Path | None = None) -> Path:
    """Compiles the simulator in `folder`, which is made. Unmutated objects are taken from the
    folder of a `sound` build where no header is mutated."""
    folder.mkdir(parents=True, exist_ok=True)
    rooms = [folder / "csrc" / room for room in ROOMS]
    for room in rooms:
        if room.exists():
            shutil.rmtree(room)
        shutil.copytree(CSRC / room.name, room)
    for name in HEADER_ROOMS:
        shutil.copytree(CSRC / name, folder / "csrc" / name, dirs_exist_ok=True)
    for header in HEADERS:
        (folder / "csrc" / header).parent.mkdir(exist_ok=True)
        shutil.copy(CSRC / header, folder / "csrc" / header)
    for mutation in mutations:
        headers = [folder / "csrc" / header for header in HEADERS]
        candidates = [*headers, *(room / mutation.file for room in rooms)]
        path = next(
            (path for path in candidates if path.name == mutation.file and path.exists()), None
        )
        if path is None:
            raise BuildError(f"no room has {mutation.file}")
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise BuildError(f"{mutation.file} has {text.count(mutation.old)} of: {mutation.old}")
        path.write_text(text.replace(mutation.old, mutation.new))
    sources = [path for room in (*rooms, HERE) for path in sorted(room.glob("*.cpp"))]
    mutated = {mutation.file for mutation in mutations}
    if any(name.endswith(".h") for name in mutated):
        sound = None

    def compile_one(source: Path) -> Path:
        if sound is not None and source.name not in mutated:
            return sound / f"{source.stem}.o"
        target = folder / f"{source.stem}.o"
        command = [compiler(), *FLAGS, f"-I{folder / 'csrc'}", f"-I{HERE}", "-c", str(source)]
        _run([*command, "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "simulate"
    _run([compiler(), *map(str, objects), "-o", str(program), "-pthread"])
    return program


def built_once() -> Path:
    """The simulator without mutations, which is recompiled only when one of its sources has
    changed. Several processes may call this at the same time."""
    folders = [HERE, *(CSRC / room for room in (*ROOMS, *HEADER_ROOMS))]
    digest = hashlib.sha256(" ".join([compiler(), *FLAGS]).encode())
    sources = [path for folder in folders for path in folder.glob("*.[ch]*")]
    for source in sorted(sources + [CSRC / header for header in HEADERS]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = BUILT / digest.hexdigest()[:16]
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        for old in BUILT.iterdir():  # except the ones in use by another process
            if time.time() - old.stat().st_mtime > 3600:
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as temporary:
            made = Path(temporary) / "made"
            build(made)
            try:
                made.rename(folder)
            except OSError:
                pass  # another process was first
    return folder / "simulate"


def run(program: Path, seeds: int, first: int = 1, *, stop_at_first: bool = False) -> Outcome:
    """Runs this many seeds, shared among the cores."""
    cores = len(os.sched_getaffinity(0))
    each = -(-seeds // cores)
    shares = [(first + start, min(each, seeds - start)) for start in range(0, seeds, each)]

    def run_share(share: tuple[int, int]) -> subprocess.CompletedProcess[str]:
        command = [str(program), "--first", str(share[0]), "--seeds", str(share[1])]
        command += ["--stop-at-first"] if stop_at_first else []
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(cores) as pool:
        done = list(pool.map(run_share, shares))
    said = "".join(share.stdout + share.stderr for share in done)
    return Outcome(sum(share.returncode != 0 for share in done), said)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200_000, help="schedules to run (200,000)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (1)")
    parser.add_argument(
        "--replay", type=int, metavar="SEED", help="one run, with all of its events"
    )
    parser.add_argument("--folder", type=Path, help="to build in; by default one that is removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            program = build(args.folder or Path(temporary))
        except BuildError as err:
            print(err, file=sys.stderr)
            return 2
        if args.replay is not None:
            return subprocess.run([str(program), "--replay", str(args.replay)]).returncode
        outcome = run(program, args.seeds, args.first)
        print(outcome.said, end="")
        if outcome.failed:
            print("replay a seed with: python3 tests/sim/simulation.py --replay SEED")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
