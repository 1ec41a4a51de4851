# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy over csrc, several files at a time, without those known to be clean.

Torch's headers make clang-tidy take tens of seconds for one file. A file is known by its text, the
text of our headers that it reaches, how it is compiled, and the checks; build/tidy holds an empty
file for each that was clean.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CSRC = Path("csrc").resolve()
CLEAN = Path("build/tidy")


def reached(path: Path, seen: set[Path]) -> set[Path]:
    """`path` and every header of ours that it includes, directly or not."""
    if path not in seen and path.is_file():
        seen.add(path)
        for name in INCLUDE.findall(path.read_bytes()):
            for folder in (CSRC, CSRC / "include"):
                reached(folder / name.decode(), seen)
    return seen


def fingerprint(path: Path, command: str) -> str:
    digest = hashlib.sha256(command.encode() + Path(".clang-tidy").read_bytes())
    for file in sorted(reached(path, set())):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    show = [sys.executable, "setup.py", "-q", "native", "--configure-only", "--show-folder"]
    build = Path(subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip())
    todo = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = Path(entry["file"])
        if path.is_relative_to(CSRC) and path.suffix == ".cpp":
            clean = CLEAN / fingerprint(path, entry["command"])
            if not clean.exists():
                todo.append((path, clean))
    CLEAN.mkdir(parents=True, exist_ok=True)
    done = 0

    def check(item: tuple[Path, Path]) -> bool:
        nonlocal done
        path, clean = item
        tidy = ["clang-tidy-14", "-p", str(build), "--quiet", "--warnings-as-errors=*"]
        # The recorded command is g++'s, which may name warnings that clang has not got.
        tidy += ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wthread-safety"]
        tidy.append(str(path))
        answer = subprocess.run(tidy, capture_output=True, text=True)
        done += 1
        print(f"[{done}/{len(todo)}] {path.relative_to(CSRC.parent)}", flush=True)
        if answer.returncode == 0:
            clean.touch()
        else:
            # Its errors stand in one of the two, among a count of warnings in torch's headers.
            print(answer.stdout, *answer.stderr.splitlines()[-20:], sep="\n", flush=True)
        return answer.returncode == 0

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return 0 if all(list(pool.map(check, todo))) else 1


if __name__ == "__main__":
    sys.exit(main())
